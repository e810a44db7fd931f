"""The tables of a run: their copies, those that join the publications, and columns that are added, renamed or dropped."""
