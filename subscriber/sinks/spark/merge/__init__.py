"""Changes of a table become its rows: keys, folding, and the units of work that any engine can run."""
