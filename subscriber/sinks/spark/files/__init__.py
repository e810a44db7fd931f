"""Files of a lake: its location, durable writes, JSON documents, and locks."""
