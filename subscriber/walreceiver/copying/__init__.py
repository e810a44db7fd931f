"""The publisher side of the initial copy: snapshots, and the rows of a table."""
