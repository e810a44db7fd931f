"""Where one message of a server ends and the next begins: all that the proxy knows of a protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

HEADER = 5
"""Of PostgreSQL: the tag, and the length without the tag."""
_MARIADB_HEADER = 4


class Framing(Protocol):
    """Divides the bytes of one connection."""

    def take(self, buffer: bytearray) -> Iterator[bytes]:
        """Remove whole messages from the front of the buffer."""
        ...


class NoFraming:
    """Any protocol, also TLS: bytes as they come."""

    def take(self, buffer: bytearray) -> Iterator[bytes]:
        data = bytes(buffer)
        buffer.clear()
        yield data


class PostgresFraming:
    """Tag and length. The sessions ask for no TLS: the answer to that has no length."""

    def take(self, buffer: bytearray) -> Iterator[bytes]:
        start = 0
        while len(buffer) - start >= HEADER:
            end = start + 1 + int.from_bytes(buffer[start + 1 : start + HEADER], "big")
            if end > len(buffer):
                break
            yield bytes(buffer[start:end])
            start = end
        del buffer[:start]


class MariaDBFraming:
    """Length and sequence number."""

    def take(self, buffer: bytearray) -> Iterator[bytes]:
        start = 0
        while len(buffer) - start >= _MARIADB_HEADER:
            end = start + _MARIADB_HEADER + int.from_bytes(buffer[start : start + 3], "little")
            if end > len(buffer):
                break
            yield bytes(buffer[start:end])
            start = end
        del buffer[:start]
