"""Which sink and which catalog a target's text means."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from subscriber.abc import Sink
from subscriber.catalog import Catalog, Observation
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError

__all__ = ["ApplyOptions", "observe_target", "open_catalog", "open_target", "spark_apply"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_POSTGRES = frozenset({"postgresql", "postgres"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """How a lake is applied.

    Attributes:
        engine: ``rewrite`` on Spark, ``local`` in threads.
        master, conf, packages: of Spark; see :func:`subscriber.sinks.spark.session.spark_session`.
        target_rows: of a file.
        once: end when nothing waits.
    """

    engine: str = "rewrite"
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    packages: str | None = None
    target_rows: int = 250_000
    once: bool = False


def open_target(target: str, options: SubscriptionOptions, settings: Settings) -> Sink:
    """Make the sink for a URL or conninfo. Nothing is connected yet.

    Raises:
        ConfigurationError: no sink serves this kind of URL, its driver is not installed, or the text is neither URL nor conninfo.
    """
    if _is_lake(target):
        with _lake():
            from subscriber.sinks.spark import SparkSink  # noqa: PLC0415 -- pyarrow comes with an extra
        return SparkSink(target, options=options, settings=settings)
    _require_known(target)
    with _postgres():
        from subscriber.sinks.postgres import PostgresSink  # noqa: PLC0415 -- its driver comes with an extra
    return PostgresSink(target, options=options, settings=settings)


async def open_catalog(target: str, application_name: str) -> Catalog:
    """Connect with the target's catalog of subscriptions; make it if it is not there.

    Raises:
        ConfigurationError: as :func:`open_target`.
        TargetUnavailable, TargetError
    """
    _require_known(target)
    with _postgres():
        from subscriber.sinks.postgres import PostgresCatalog  # noqa: PLC0415 -- as above
    return await PostgresCatalog.open(target, application_name)


async def observe_target(target: str) -> Sequence[Observation]:
    """What the target knows of its subscriptions; nothing is made.

    Raises:
        ConfigurationError: as :func:`open_target`.
        TargetUnavailable, TargetError
    """
    _require_known(target)
    with _postgres():
        from subscriber.sinks.postgres import observe  # noqa: PLC0415 -- as above
    return await observe(target)


def spark_apply(lake: str, options: ApplyOptions, stop: threading.Event) -> None:
    """Apply a lake until ``stop`` is set. Blocks.

    Raises:
        ConfigurationError: a URL that is none, or what it needs is not installed.
        SubscriptionInUse: the lake has an applier.
        TargetError, DataLossError
    """
    with _lake():
        from subscriber.sinks.spark.program import apply_lake  # noqa: PLC0415 -- pyarrow and deltalake come with an extra
    apply_lake(
        lake,
        stop,
        engine=options.engine,
        master=options.master,
        conf=options.conf,
        packages=options.packages,
        target_rows=options.target_rows,
        once=options.once,
    )


def _is_lake(target: str) -> bool:
    scheme = _SCHEME.match(target)
    return scheme is not None and scheme[1].lower().partition("+")[0] == "spark"


def _require_known(target: str) -> None:
    if _is_lake(target):
        raise ConfigurationError(
            "a lake has no catalog of subscriptions: each is one subscription's",
            hint="use subscriber run --target spark:///path with the subscription's parameters",
        )
    scheme = _SCHEME.match(target)
    if scheme is not None and scheme[1].lower() not in _POSTGRES:
        raise ConfigurationError(
            f'there is no sink for targets of kind "{scheme[1]}"',
            hint="a target is a PostgreSQL database, postgresql://user@host:5432/dbname, or a lake, spark:///path",
        )


@contextlib.contextmanager
def _postgres() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"a PostgreSQL target needs {error.name}, which is not installed", hint="pip install 'pg-subscriber[postgres]'"
        ) from error


@contextlib.contextmanager
def _lake() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"a Spark target needs {error.name}, which is not installed", hint="pip install 'pg-subscriber[lake]'"
        ) from error
