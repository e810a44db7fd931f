"""Targets that SQLAlchemy supports: SQLite, MariaDB and MySQL, and other databases by their URL."""
