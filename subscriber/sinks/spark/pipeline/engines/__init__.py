"""Engines, which do the work of a round: ``local`` in threads, ``spark`` on executors."""
