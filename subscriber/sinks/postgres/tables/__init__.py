"""The target's tables, and how the publisher's relations map to them."""
