"""Tables: their states, their synchronization, and parking."""
