"""IO to targets, one sink a folder."""
