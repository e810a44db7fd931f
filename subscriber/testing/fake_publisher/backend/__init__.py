"""One connection of a client, as a backend process of the server has it: start-up, authentication, queries, results."""
