"""Ports for servers of our own."""

from __future__ import annotations

import random
import socket
from typing import Final

from subscriber.errors import SubscriberError

__all__ = ["LOOPBACK", "EmbeddedServerError", "free_port"]

LOOPBACK: Final = "127.0.0.1"


class EmbeddedServerError(SubscriberError):
    """An embedded server could not be made, started or stopped. The end of its log is in the notes."""


def free_port() -> int:
    """A port of the loopback address that is free now, below the range that the system takes for outgoing connections.

    Raises:
        EmbeddedServerError: none was found.
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
