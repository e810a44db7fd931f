"""The schema of a database: copied from the publisher to a target, and compared."""
