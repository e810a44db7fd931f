"""Connections to the publisher: libpq through psycopg.pq."""
