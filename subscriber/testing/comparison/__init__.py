"""Compare the rows of two databases."""
