"""Columns of a table: types, values, schemas, and how they change."""
