"""A mixed random load on a publisher."""
