"""Plans: which changes wait for a table, and how the work of a round is divided into units."""
