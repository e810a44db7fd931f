"""A proxy whose connections can be frozen: as behind a firewall that has dropped them, both ends see neither data nor an end.

It can be slow as well, and give sessions numbers of its own, as poolers do.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

_SMALL = 32 * 1024
_BACKEND_KEY = b"K\x00\x00\x00\x0c"


class FrozenProxy:
    """Forwards connections of one local port to a server.

    Args:
        pause: seconds after each 64 kB of a large message.
        pools: clients are told PIDs that are no session's.

    Attributes:
        port: its own.
    """

    def __init__(self, host: str, port: int, pause: float = 0.0, *, pools: bool = False) -> None:
        self._server = host, port
        self._pools = pools
        self._pause = pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._frozen = threading.Event()
        self._sockets: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink, self._frozen), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, frozen: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if frozen.is_set():
                    return
                if self._pools and (place := data.find(_BACKEND_KEY)) >= 0:
                    place += len(_BACKEND_KEY)
                    data = data[:place] + b"\x7f\xff\xff\xff" + data[place + 4 :]
                sink.sendall(data)
                if len(data) > _SMALL:
                    time.sleep(self._pause)
            if not frozen.is_set():
                sink.shutdown(socket.SHUT_WR)

    def freeze(self, *, all_later: bool = False) -> None:
        """The connections of now forward nothing any more; new ones do, unless ``all_later``."""
        self._frozen.set()
        if not all_later:
            self._frozen = threading.Event()

    def close(self) -> None:
        # close() alone leaves accept() waiting, which would take one more connection
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for found in self._sockets:
            # close() alone sends nothing while a thread waits in recv()
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
            found.close()


@contextlib.contextmanager
def frozen_proxy(host: str, port: int, pause: float = 0.0, *, pools: bool = False) -> Iterator[FrozenProxy]:
    """One while the block lasts."""
    proxy = FrozenProxy(host, port, pause, pools=pools)
    try:
        yield proxy
    finally:
        proxy.close()
