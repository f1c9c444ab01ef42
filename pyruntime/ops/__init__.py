"""One function per operation: check shapes, pick the table row, size the grid, record the launch."""
