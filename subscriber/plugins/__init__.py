"""Output plugins: PostgreSQL's callbacks in Python, fed from pgoutput on our side of the wire."""
