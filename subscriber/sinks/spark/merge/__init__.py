"""Merging the changes of a table into its rows: keys, folding, and units of work that any engine can run."""
