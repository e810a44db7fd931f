"""Delta tables of a lake: files, commits, columns, and commits of other writers."""
