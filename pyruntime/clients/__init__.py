"""Other projects' programs that run on an engine. Each needs the extra that its module names."""
