"""Apply transactions: statements, batches of changes, and prepared transactions."""
