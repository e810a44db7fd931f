"""Initial copies: one table, or several through one session."""
