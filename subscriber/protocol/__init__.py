"""Decode and encode the protocol's bytes, without IO, clock, randomness or driver."""
