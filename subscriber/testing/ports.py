"""Ports for embedded servers."""

from __future__ import annotations

import random
import socket
from typing import Final

from subscriber.errors import SubscriberError

__all__ = ["LOOPBACK", "EmbeddedServerError", "free_port"]

LOOPBACK: Final = "127.0.0.1"


class EmbeddedServerError(SubscriberError):
    """An embedded server could not be created, started or stopped. The end of its log is in the notes."""


def free_port() -> int:
    """Return a free port of the loopback address, below the range that the system uses for outgoing connections.

    Raises:
        EmbeddedServerError: there is none.
    """
    for _ in range(200):
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        return port
    raise EmbeddedServerError(f"no free port between 20000 and 32000 on {LOOPBACK}")
