"""One function per operation: check shapes, pick the table row and grid, record the launch."""
