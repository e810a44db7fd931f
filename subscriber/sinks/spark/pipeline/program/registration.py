"""Registers the tables of a lake in a catalog of Spark: ``spark-apply --register CATALOG.SCHEMA``.

For each table ``orders`` of schema ``public``:

* ``public_orders_latest``: an external table on the Delta directory. Its newest version may be ahead of other tables.
* ``public_orders``: a view of the version in the published snapshot. If another table has this name (``a_b.c`` and ``a.b_c``), both get
  a digest behind it.

All of these views select from one other view, ``published_snapshot``, which alone names the versions. It is a UNION ALL of all tables, each
as a struct of its own::

    SELECT 'public_orders' AS name, struct(*) AS public_orders, NULL AS public_items FROM delta.`…` VERSION AS OF 17 UNION ALL …
    SELECT public_orders.* FROM published_snapshot WHERE name = 'public_orders'

A publication replaces this one view, by one change of the catalog (ALTER VIEW). Spark looks up a view once for each query, however often
the query uses it. So all tables in a query are of one snapshot, without a lock. The optimizer removes the other tables and the structs: a
query reads what it would read from the Delta table itself. But it must open the logs of all tables of the lake. So a lake with many tables
has no such view: each table's view names its own version, and is replaced if its table has changed. Then a query may see two snapshots
while one is registered. A table that leaves the snapshot has no view until it is back, because the view would stay at an old version.

A thread does this. If the catalog is unavailable, or does not answer, replication continues: the thread tries again, and the status of the
applier has the error. Only the newest snapshot is registered, so a slow catalog leaves out some. An error that is not of the catalog ends
the thread, and the applier with it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from subscriber.errors import ConfigurationError, SubscriberError, TargetError
from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.snapshots import Snapshot, Snapshots, SnapshotTable
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.session.jobs import first_words, job_errors
from subscriber.sinks.spark.session.object_stores import hadoop_uri
from subscriber.sinks.spark.session.spark_session import has_delta
from subscriber.sinks.spark.session.sql_text import quoted_name, quoted_text
from subscriber.sinks.spark.tables.delta_reader import DeltaReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["VIEW", "CatalogRegistration", "require_catalog", "view_names"]

_log = logging.getLogger(__name__)

VIEW: Final = "published_snapshot"
"""The view that names the versions of all tables."""
_SHARED_TABLES: Final = 50
"""With more tables than this, each view names its own version."""
_AT_ONCE: Final = 4
"""How many views are replaced at once."""
_RETRY_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 30.0
"""How long the end of the applier waits for a catalog. One that takes longer is reported."""
_PART: Final = re.compile(r"[A-Za-z0-9_]+")
_SCHEME: Final = re.compile(r"^[a-z0-9]+:/*|^/+")


def require_catalog(spark: SparkSession, schema: str) -> None:
    """Check that tables can be registered.

    Raises:
        ConfigurationError: the name is not of the form ``CATALOG.SCHEMA``, or the session has no Delta, or its catalog is in memory.
    """
    parts = schema.split(".")
    if len(parts) != 2 or not all(map(_PART.fullmatch, parts)):
        raise ConfigurationError(f'"{schema}" is not a catalog and a schema', hint="as in spark_catalog.lake")
    if not has_delta(spark):
        raise ConfigurationError("--register needs Delta's jar", hint="set spark.jars.packages as docs/explanation/lake.md says")
    if parts[0] == "spark_catalog" and spark.conf.get("spark.sql.catalogImplementation", "in-memory") == "in-memory":
        raise ConfigurationError(
            "the session's catalog is in memory: no other program would see the views",
            hint="--conf spark.sql.catalogImplementation=hive, with the settings of your metastore",
        )


class CatalogRegistration:
    """Registers snapshots in a schema, checked by :func:`require_catalog`, which is created if it does not exist. See the module.

    The session has Delta's jar. ``failed`` is told an error, once, and None when a snapshot is registered after that.
    """

    def __init__(self, spark: SparkSession, storage: Storage, schema: str, failed: Callable[[SubscriberError | None], None]) -> None:
        self._spark = spark.newSession()
        # by default, Delta reads the log of each table in 50 tasks
        self._spark.conf.set("spark.databricks.delta.snapshotPartitions", "2")
        self._storage = storage
        self._schema = ".".join(map(quoted_name, schema.split(".")))
        self._schema_name = schema
        self._failed = failed
        self._failing = False
        self._views: dict[str, str] = {}  # the queries of registered views, by name
        self._there: set[str] = set()  # the tables and views of the schema, in small letters
        self._columns: dict[TableName, list[str]] = {}  # of tables with a shared view
        self._registered: Mapping[TableName, SnapshotTable] | None = None
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._unexpected: Exception | None = None
        self._began: float | None = None  # when the catalog was called that has not answered yet

    def publish(self) -> None:
        """Let the thread register what is published now."""
        self._wake.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread in the block. At its end, the last snapshot is registered, unless the catalog is unavailable, or too slow.

        Raises:
            Exception: that ended the thread, if the block ended without an error.
        """
        thread = threading.Thread(target=self._run, name="registration", daemon=True)
        self._wake.set()
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._wake.set()
            thread.join(_PATIENCE_SECONDS)
            if thread.is_alive():
                _log.warning("%s did not answer within %.0f s: not waiting for it", self._schema_name, _PATIENCE_SECONDS)
        self.check()

    def check(self) -> None:
        """Raise the unexpected error that ended the thread, if there was one. Report a catalog that does not answer, once."""
        if self._unexpected is not None:
            raise self._unexpected
        began = self._began
        if began is not None and time.monotonic() > began + _PATIENCE_SECONDS:
            self._began = None
            slow = TargetError(
                f"{self._schema_name} has not answered for {_PATIENCE_SECONDS:.0f} s", hint="check the catalog; replication continues"
            )
            _log.error("%s", slow.one_line())
            self._failing = True
            self._failed(slow)

    def _run(self) -> None:
        try:
            self._register_newest()
        except Exception as error:  # noqa: BLE001 -- the applier's thread raises it, see check
            self._unexpected = error

    def _register_newest(self) -> None:
        snapshots, error, pause = Snapshots(self._storage), "", 0.0
        while True:
            self._wake.clear()
            stopping = self._stop.is_set()  # after the line above, which would undo the waking by a stop in between
            try:
                snapshot = snapshots.newest()
                if snapshot is not None:
                    self.register(snapshot)
                if self._failing:
                    self._failing = False
                    _log.info("registered in %s again", self._schema_name)
                    self._failed(None)
                error, pause = "", 0.0
            except TargetError as failure:
                if failure.one_line() != error:
                    error = failure.one_line()
                    _log.error("%s", error)
                    self._failing = True
                    self._failed(failure)
                pause = _RETRY_SECONDS
            if stopping:
                return
            if pause:
                self._stop.wait(pause)
            else:
                self._wake.wait()

    def register(self, snapshot: Snapshot) -> None:
        """Register a snapshot. Does nothing if its tables and versions are registered."""
        if snapshot.tables == self._registered:
            return
        names = view_names(snapshot.tables)
        self._began = time.monotonic()
        try:
            self._register(snapshot, names)
        except job_errors() as error:
            self._views, self._columns = {}, {}
            self._registered = None
            raise TargetError(
                f"could not register the snapshot at {snapshot.lsn} in {self._schema_name}: {first_words(error)}",
                hint="it is tried again; check the catalog and the permissions of the applier",
            ) from error
        finally:
            self._began = None
        self._registered = snapshot.tables

    def _register(self, snapshot: Snapshot, names: Mapping[TableName, str]) -> None:
        sql = self._spark.sql
        uris = {name: hadoop_uri(DeltaReader(self._storage, table.path).uri) for name, table in snapshot.tables.items()}
        if not self._views:
            sql(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
            self._views = self._earlier()
        self._there = {row["tableName"].lower() for row in sql(f"SHOW TABLES IN {self._schema}").collect()}
        sources = {name: f"delta.{quoted_name(uris[name])} VERSION AS OF {table.version}" for name, table in snapshot.tables.items()}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            new = [name for name, view in names.items() if view not in self._views or f"{view}_latest".lower() not in self._there]
            list(pool.map(lambda name: self._require_table(f"{names[name]}_latest", uris[name]), new))
            if is_shared := 0 < len(names) <= _SHARED_TABLES:
                views = self._share(snapshot, names, sources)
            else:
                self._columns = {}
                # named as the view, so that a later applier knows it from a view of a user
                views = {names[name]: f"SELECT * FROM {source} AS {quoted_name(names[name])}" for name, source in sources.items()}  # noqa: S608 -- quoted
            list(pool.map(lambda view: self._replace(view, views[view]), [view for view in views if self._views.get(view) != views[view]]))
        # catalogs have names in small letters
        present = {name.lower() for name in names.values()}
        for gone in {name for name in self._views if name.lower() not in present}:
            # the view last: if this is broken off, the next attempt finds it
            sql(f"DROP TABLE IF EXISTS {self._of(f'{gone}_latest')}")
            sql(f"DROP VIEW IF EXISTS {self._of(gone)}")
        if not is_shared:
            sql(f"DROP VIEW IF EXISTS {self._of(VIEW)}")
        self._views = views

    def _share(self, snapshot: Snapshot, names: Mapping[TableName, str], sources: Mapping[TableName, str]) -> dict[str, str]:
        """Replace the view of all tables. Return the queries of the tables' views, which select from it."""
        self._columns = {
            name: self._spark.sql(f"SELECT * FROM {sources[name]}").columns  # noqa: S608 -- quoted
            if name not in self._columns or (self._registered or {}).get(name) != table
            else self._columns[name]
            for name, table in snapshot.tables.items()
        }
        selects, views = [], {}
        for name, view in names.items():
            structs = [f"{'struct(*)' if other == name else 'NULL'} AS {quoted_name(names[other])}" for other in names]
            selects.append(f"SELECT {quoted_text(view)} AS name, {', '.join(structs)} FROM {sources[name]}")  # noqa: S608 -- quoted
            chosen = ", ".join(f"{quoted_name(view)}.{quoted_name(column)}" for column in self._columns[name])
            views[view] = f"SELECT {chosen} FROM {self._of(VIEW)} WHERE name = {quoted_text(view)}"  # noqa: S608 -- quoted
        self._replace(VIEW, " UNION ALL ".join(selects))
        return views

    def _earlier(self) -> dict[str, str]:
        """The views of tables that are in the catalog, from an earlier applier, with their queries."""
        names = {row["viewName"] for row in self._spark.sql(f"SHOW VIEWS IN {self._schema}").collect()} - {VIEW}
        # other views that select from it are a user's
        ours = {name: f" FROM {self._of(VIEW)} WHERE name = {quoted_text(name)}".lower() for name in names}
        place = quoted_name(hadoop_uri(DeltaReader(self._storage, "tables").uri))[:-1]
        own = f"SELECT * FROM delta.{place}/".lower()  # noqa: S608 -- only compared
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            texts = dict(zip(names, pool.map(lambda name: self._described(name, "View Text"), names), strict=True))
        return {
            name: text
            for name, text in texts.items()
            if text.lower().endswith(ours[name])
            or (text.lower().startswith(own) and text.lower().endswith(f" as {quoted_name(name)}".lower()))
        }

    def _described(self, name: str, what: str) -> str:
        rows = self._spark.sql(f"DESCRIBE TABLE EXTENDED {self._of(name)}").collect()
        # after the columns, which may have that name
        return next((str(row["data_type"]) for row in reversed(rows) if row["col_name"] == what), "")

    def _require_table(self, name: str, uri: str) -> None:
        """Create an external table, if it does not exist."""
        if name.lower() not in self._there:
            self._spark.sql(f"CREATE TABLE {self._of(name)} USING DELTA LOCATION {quoted_text(uri)}")
        elif unquote(_SCHEME.sub("", self._described(name, "Location"))) != _SCHEME.sub("", uri):
            raise TargetError(f"{self._schema_name}.{name} exists and is another table", hint="drop it, or register in another schema")

    def _replace(self, name: str, query: str) -> None:
        """Replace a view by one change of the catalog. CREATE OR REPLACE VIEW would drop it first."""
        if name.lower() in self._there:
            self._spark.sql(f"ALTER VIEW {self._of(name)} AS {query}")
        else:
            self._spark.sql(f"CREATE VIEW {self._of(name)} AS {query}")

    def _of(self, name: str) -> str:
        return f"{self._schema}.{quoted_name(name)}"


def view_names(tables: Iterable[TableName]) -> dict[TableName, str]:
    """The names of the tables' views. Where names of two tables or their ``_latest`` collide, a digest makes them different."""
    plain = {table: f"{table.namespace}_{table.name}" for table in sorted(tables)}
    # catalogs have names in small letters
    used = Counter([VIEW, *(each for name in plain.values() for each in (name.lower(), f"{name.lower()}_latest"))])
    return {
        table: f"{name}_{sha256(str(table).encode()).hexdigest()[:8]}"
        if max(used[name.lower()], used[f"{name.lower()}_latest"]) > 1
        else name
        for table, name in plain.items()
    }
