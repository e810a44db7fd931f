"""Choose the sink and the catalog for a target's URL or conninfo.

``postgresql://…``, ``postgres://…`` and libpq's keywords and values select the PostgreSQL sink. ``spark:///path`` and ``spark+…://…``
select a lake. ``plugin:package.module:Class`` is an output plugin, which has no sink and no catalog. Every other URL is one of
SQLAlchemy's: ``sqlite:///file.db``, ``mariadb://…``.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from subscriber.abc import PublishedTable, Query, Sink
from subscriber.abc.schema import SchemaProgress, Section
from subscriber.abc.sequences import PublishedSequence, SequenceResult
from subscriber.abc.table_schema import DatabaseSchema, SchemaDifference
from subscriber.catalog import Catalog, Definition, Observation
from subscriber.catalog.store import Store
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError

if TYPE_CHECKING:
    from subscriber.sinks.spark.reading.compared_lake import ComparedLake
    from subscriber.sinks.sqlalchemy.snapshots import SnapshotSessions

__all__ = [
    "ApplyOptions",
    "compare_with_other",
    "create_in_other",
    "is_lake",
    "is_plugin",
    "observe_target",
    "open_catalog",
    "open_compared_lake",
    "open_snapshot_sessions",
    "open_target",
    "set_sequences",
    "spark_apply",
    "uses_sqlalchemy",
]

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://")
_POSTGRES: Final = frozenset({"postgresql", "postgres"})

_EXTRAS: Final = {"sqlite": "sqlite", "mysql": "mysql", "mariadb": "mysql"}
"""The extra that installs the driver of each kind of database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """Options of the applier of a lake.

    Attributes:
        engine: ``local`` runs in threads, ``spark`` on executors. None: ``spark`` if an option for Spark is given, or under spark-submit,
            else ``local``.
        master, conf, packages: for Spark, see :func:`subscriber.sinks.spark.session.spark_session.spark_session`.
        parameters: parameters that take precedence over those in the lake's URL: ``freshness``, ``max_write_rate``, ``retain_hours``,
            ``target_rows``.
        progress: a file to which an event in JSON is appended for each round.
        watch: is given the progress of the applier before it starts, for its metrics.
        register: ``CATALOG.SCHEMA`` of Spark in which the tables are registered. None: nowhere.
        once: end when nothing is waiting.
    """

    engine: str | None = None
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    packages: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    progress: str | None = None
    watch: Callable[[Any], None] | None = None
    register: str | None = None
    once: bool = False


def open_target(target: str, options: SubscriptionOptions, settings: Settings, *, defined: bool = False) -> Sink:
    """Make the sink for a URL or conninfo. It does not connect yet.

    Args:
        target: URL or conninfo of the target.
        options: of the subscription.
        settings: of the process.
        defined: whether the target's catalog defines the subscription. Then the sink does not create one that was dropped or renamed.

    Raises:
        ConfigurationError: no sink supports this kind of URL, its driver is not installed, the text is neither a URL nor a conninfo, or a
            setting does not apply to this kind of target.
    """
    _refuse_plugin(target)
    if is_lake(target):
        with _lake():
            from subscriber.sinks.spark.sink import SparkSink  # noqa: PLC0415 -- pyarrow comes with an extra
        return SparkSink(target, options=options, settings=settings, defined=defined)
    if uses_sqlalchemy(target):
        with _sqlalchemy(target):
            from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink  # noqa: PLC0415 -- its drivers come with an extra

            return SqlAlchemySink(target, options=options, settings=settings, defined=defined)
    _require_postgres_settings(settings)
    with _postgres():
        from subscriber.sinks.postgres.sink import PostgresSink  # noqa: PLC0415 -- as above
    return PostgresSink(target, options=options, settings=settings, defined=defined)


async def open_catalog(target: str, application_name: str) -> Catalog:
    """Connect to the target's catalog of subscriptions. Create the catalog if it does not exist.

    Raises:
        ConfigurationError: as :func:`open_target`.
        TargetUnavailable, TargetError: the target cannot be reached, or rejected a request.
    """
    _refuse_plugin(target)
    if is_lake(target):
        with _lake():
            from subscriber.sinks.spark.catalog.subscriptions import LakeCatalog  # noqa: PLC0415 -- as above
        return await LakeCatalog.open(target)
    if uses_sqlalchemy(target):
        with _sqlalchemy(target):
            from subscriber.sinks.sqlalchemy.catalog.subscriptions import SqlAlchemyCatalog  # noqa: PLC0415 -- as above

            return await SqlAlchemyCatalog.open(target)
    with _postgres():
        from subscriber.sinks.postgres.catalog.subscriptions import PostgresCatalog  # noqa: PLC0415 -- as above
    return await PostgresCatalog.open(target, application_name)


@contextlib.asynccontextmanager
async def open_store(target: str, application_name: str) -> AsyncIterator[tuple[Store, Callable[[str], Awaitable[Definition]]]]:
    """Open the target's catalog, and give its rows, and a function that finds the definition of a subscription by its name.

    Raises:
        ConfigurationError: as :func:`open_target`; or the target is a lake, whose catalog has no rows.
        TargetUnavailable, TargetError: the target cannot be reached, or rejected a request.
    """
    from subscriber.catalog.subscriptions import StoredCatalog  # noqa: PLC0415 -- most verbs need only one kind of target

    if is_lake(target):
        # before its catalog is opened, which may create it
        raise ConfigurationError("the rows of a lake cannot be repaired one by one", hint="copy the table again")
    catalog = await open_catalog(target, application_name)
    try:
        assert isinstance(catalog, StoredCatalog), "all others store rows"
        yield catalog.store, catalog.find
    finally:
        await catalog.close()


async def observe_target(target: str) -> Sequence[Observation]:
    """Read what the target knows of its subscriptions. Nothing is created.

    Raises:
        ConfigurationError: as :func:`open_target`.
        TargetUnavailable, TargetError: the target cannot be reached, or rejected a request.
    """
    _refuse_plugin(target)
    if is_lake(target):
        with _lake():
            from subscriber.sinks.spark.catalog.observe import observe as observe_lake  # noqa: PLC0415 -- as above
        return await observe_lake(target)
    if uses_sqlalchemy(target):
        with _sqlalchemy(target):
            from subscriber.sinks.sqlalchemy.catalog.subscriptions import observe as observe_other  # noqa: PLC0415 -- as above

            return await observe_other(target)
    with _postgres():
        from subscriber.sinks.postgres.catalog.subscriptions import observe  # noqa: PLC0415 -- as above
    return await observe(target)


def read_postgres_snapshot(
    target: str, snapshot_name: str | None, jobs: int, *, application_name: str
) -> AbstractAsyncContextManager[Sequence[Query]]:
    """Open sessions that share an exported snapshot of a PostgreSQL target. See :func:`subscriber.sinks.postgres.snapshots.read_snapshot`.

    Raises:
        ConfigurationError: as :func:`open_target`.
        TargetUnavailable, TargetError: the target cannot be reached, or has no such snapshot.
    """
    with _postgres():
        from subscriber.sinks.postgres.snapshots import read_snapshot  # noqa: PLC0415 -- as above
    return read_snapshot(target, snapshot_name, jobs, application_name=application_name)


def open_snapshot_sessions(target: str, jobs: int) -> AbstractAsyncContextManager[SnapshotSessions]:
    """Open sessions with a target of SQLAlchemy that can begin snapshots, if it has any.

    Raises:
        ConfigurationError: as :func:`open_target`.
        TargetUnavailable, TargetError: the target cannot be reached.
    """
    with _sqlalchemy(target):
        from subscriber.sinks.sqlalchemy.snapshots import SnapshotSessions  # noqa: PLC0415 -- as above
    return SnapshotSessions.open(target, jobs)


def open_compared_lake(target: str) -> ComparedLake:
    """Open a lake to compare its tables.

    Raises:
        ConfigurationError: as :func:`open_target`; or it is not in a directory.
    """
    with _lake():
        from subscriber.sinks.spark.reading.compared_lake import ComparedLake  # noqa: PLC0415 -- as above
    return ComparedLake.open(target)


async def set_sequences(target: str, sequences: Sequence[PublishedSequence], *, force: bool, dry_run: bool) -> list[SequenceResult]:
    """Set the sequences of a target that is no lake.

    Raises:
        ConfigurationError: as :func:`open_target`; or this kind of database is not supported.
        TargetUnavailable, TargetError: the target cannot be reached.
    """
    _refuse_plugin(target)
    if uses_sqlalchemy(target):
        with _sqlalchemy(target):
            from subscriber.sinks.sqlalchemy.sequences import set_sequences as set_others  # noqa: PLC0415 -- as above

            return await set_others(target, sequences, force=force, dry_run=dry_run)
    with _postgres():
        from subscriber.sinks.postgres.sequences import set_sequences as set_postgres  # noqa: PLC0415 -- as above
    return await set_postgres(target, sequences, force=force, dry_run=dry_run)


async def create_in_other(
    target: str, tables: Sequence[PublishedTable], schema: DatabaseSchema, sections: Sequence[Section], progress: SchemaProgress
) -> list[str]:
    """Create tables, keys and indexes in a target of SQLAlchemy. See :func:`subscriber.sinks.sqlalchemy.schema_objects.copy_schema`.

    Raises:
        ConfigurationError: as :func:`open_target`.
        TargetUnavailable, TargetError: an object cannot be created.
    """
    with _sqlalchemy(target):
        from subscriber.sinks.sqlalchemy.schema_objects import copy_schema  # noqa: PLC0415 -- as above

        return await copy_schema(target, tables, schema, sections, progress)


async def compare_with_other(target: str, tables: Sequence[PublishedTable], schema: DatabaseSchema) -> list[SchemaDifference]:
    """Compare the schema with that of a target of SQLAlchemy.

    Raises:
        ConfigurationError: as :func:`open_target`.
        TargetUnavailable, TargetError: the target cannot be read.
    """
    with _sqlalchemy(target):
        from subscriber.sinks.sqlalchemy.schema_objects import compare_schema  # noqa: PLC0415 -- as above

        return await compare_schema(target, tables, schema)


def spark_apply(lake: str, options: ApplyOptions, stop: threading.Event) -> None:
    """Apply landed batches to the tables of a lake until ``stop`` is set. Blocks.

    Raises:
        ConfigurationError: the URL is invalid, or a required package is not installed.
        SubscriptionInUse: the lake already has an applier.
        TargetError, DataLossError: the lake cannot be read or written, landed changes are lost, or with ``once`` a table is stopped.
    """
    with _lake():
        from subscriber.sinks.spark.pipeline.program import apply_lake  # noqa: PLC0415 -- pyarrow and deltalake come with an extra
    apply_lake(
        lake,
        stop,
        engine=options.engine,
        master=options.master,
        conf=options.conf,
        packages=options.packages,
        parameters=options.parameters,
        progress=options.progress,
        watch=options.watch,
        register=options.register,
        once=options.once,
    )


def is_lake(target: str) -> bool:
    """Whether the target is the URL of a lake."""
    scheme = _SCHEME.match(target)
    return scheme is not None and scheme[1].lower().partition("+")[0] == "spark"


def is_plugin(target: str) -> bool:
    """Whether the target is an output plugin, ``plugin:package.module:Class``."""
    return target.startswith("plugin:")


def _refuse_plugin(target: str) -> None:
    if is_plugin(target):
        raise ConfigurationError(
            "an output plugin stores no subscription",
            hint="use subscriber run --connection … --publication … --target plugin:…; its status is that of the slot on the publisher",
        )


def uses_sqlalchemy(target: str) -> bool:
    """Whether the target is a URL for SQLAlchemy, and not PostgreSQL or a lake."""
    scheme = _SCHEME.match(target)
    return scheme is not None and scheme[1].lower() not in _POSTGRES and not is_lake(target)


def _require_postgres_settings(settings: Settings) -> None:
    if settings.create_tables:
        raise ConfigurationError(
            "create_tables is not available for a PostgreSQL target: its tables must be those of the publisher",
            hint="copy them with pg_dump --schema-only | psql",
        )
    for name, default in (("schema_change", "error"), ("insert_conflict", "error")):
        if getattr(settings, name) != default:
            raise ConfigurationError(
                f"{name} is not available for a PostgreSQL target, which behaves as a native subscription",
                hint="omit it",
            )


@contextlib.contextmanager
def _sqlalchemy(target: str) -> Iterator[None]:
    scheme = _SCHEME.match(target)
    kind = scheme[1].lower() if scheme else target
    try:
        yield
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(kind.partition("+")[0], "sqlalchemy")
        raise ConfigurationError(
            f'a target of kind "{kind}" needs {error.name}, which is not installed', hint=f"pip install 'pg-subscriber[{extra}]'"
        ) from error


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
