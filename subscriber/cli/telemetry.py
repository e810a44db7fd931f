"""OpenTelemetry: export metrics and traces if the variables of its SDK ask for it. Without them nothing of it is imported.

Needs ``pg-subscriber[otel]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from typing import Final

from subscriber.cli.http.site import Site, worked
from subscriber.printable import printable

__all__ = ["ENDPOINT", "exported", "is_wanted"]

_log = logging.getLogger(__name__)

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OF_METRICS: Final = (ENDPOINT, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
_OF_TRACES: Final = (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "prometheus_client")


def is_wanted() -> bool:
    """Whether the environment names an endpoint."""
    return any(_wanted())


def _wanted() -> tuple[bool, bool]:
    """Whether the environment names an endpoint for metrics, and one for traces."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False, False
    return any(map(os.environ.get, _OF_METRICS)), any(map(os.environ.get, _OF_TRACES))


@contextlib.contextmanager
def exported(site: Site, *, served: bool) -> Iterator[None]:
    """Export what a site knows inside the block, if the environment names an endpoint. It may start and end at any time.

    Args:
        site: has the metrics.
        served: whether a server runs :meth:`~subscriber.cli.http.site.Site.work`.
    """
    metrics, traces = _wanted()
    if not (metrics or traces):
        yield
        return
    missing = [package for package in _PACKAGES if not _is_installed(package)]
    if missing:
        _log.warning("nothing is exported to OpenTelemetry: %s is not installed (hint: pip install 'pg-subscriber[otel]')", missing[0])
        yield
        return
    from subscriber.cli.telemetry_export import Telemetry  # noqa: PLC0415 -- it needs these packages

    try:
        telemetry = Telemetry.from_environment(site.collector, metrics=metrics, traces=traces)
    except Exception as error:  # noqa: BLE001 -- whatever the SDK raises about a variable must not hold up replication
        _log.warning(
            "nothing is exported to OpenTelemetry: %s (hint: correct the OTEL variables)", printable(str(error)) or type(error).__name__
        )
        yield
        return
    with contextlib.nullcontext() if served else _working(site), telemetry.watching():
        try:
            yield
        finally:
            telemetry.close()


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def _working(site: Site) -> Iterator[None]:
    """Let the site look at the servers in a thread of its own, as the server would."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(worked(site))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(loop):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, name="telemetry", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # a defect has ended it, and its loop is closed
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
