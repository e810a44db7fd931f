"""What is generated from the parser: completion of shells, and manual pages."""
