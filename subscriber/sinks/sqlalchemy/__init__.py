"""Targets of every kind that SQLAlchemy knows: SQLite, MariaDB and MySQL, and others by their URL."""
