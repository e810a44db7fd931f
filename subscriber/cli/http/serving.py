"""``--http HOST:PORT``: serve in a thread of its own, with an event loop of its own.

Needs aiohttp and prometheus-client (``pg-subscriber[http]``).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from subscriber.cli.telemetry import exported, is_wanted
from subscriber.errors import ConfigurationError

if TYPE_CHECKING:
    from subscriber.cli.http.site import Site

__all__ = ["TOKEN_VARIABLE", "served"]

TOKEN_VARIABLE: Final = "SUBSCRIBER_HTTP_TOKEN"  # noqa: S105 (a name)
_PACKAGES = ("aiohttp", "prometheus_client")


@contextlib.contextmanager
def served(address: str | None, make_site: Callable[[], Site]) -> Iterator[None]:
    """Serve a site at ``HOST:PORT`` inside the block. None: do not serve. In both cases OpenTelemetry gets its metrics, if it is asked to.

    Args:
        address: where.
        make_site: makes the site, if it is needed: to import what it consists of takes time.

    Raises:
        ConfigurationError: the address is invalid or in use, or a package is not installed.
    """
    if address is None:
        with exported(make_site(), served=False) if is_wanted() else contextlib.nullcontext():
            yield
        return
    host, port = _parse(address)
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(f"--http needs {package}, which is not installed", hint="pip install 'pg-subscriber[http]'")
    from subscriber.cli.http.server import ServerThread  # noqa: PLC0415 -- it needs these packages

    site = make_site()
    server = ServerThread(host, port, site)
    try:
        server.start()
    except OSError as error:
        raise ConfigurationError(f"cannot serve at {address}: {error.strerror or error}", hint="choose another HOST:PORT") from error
    try:
        with exported(site, served=True):
            yield
    finally:
        server.stop()


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ConfigurationError(
            f'"{address}" is not a valid address for --http', hint="use HOST:PORT, for example 127.0.0.1:9187, or a port alone"
        )
    return host.strip("[]") or "127.0.0.1", int(port)
