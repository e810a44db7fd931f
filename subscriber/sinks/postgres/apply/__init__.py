"""Apply transactions: the SQL of changes, conflicts, and prepared transactions."""
