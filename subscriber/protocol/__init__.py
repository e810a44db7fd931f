"""Bytes to messages and back, without IO, clock, randomness or driver."""
