"""The verbs of a migration: the schema, the sequences, the cutover."""
