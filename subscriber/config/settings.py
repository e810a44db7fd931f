"""Settings that PostgreSQL keeps in postgresql.conf, with the same names, and settings of our own for batches and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, Self

from subscriber.config.option import declared, option, parse_options
from subscriber.config.reading import BOOLEAN, SECONDS, SIZE, STRING, TIME, WHOLE, choice
from subscriber.errors import ConfigurationError

__all__ = ["SETTINGS", "DroppedColumns", "NewTables", "SchemaChange", "SchemaChangeCallback", "Settings"]

NewTables = Literal["ignore", "copy"]
DroppedColumns = Literal["keep", "drop"]
SchemaChange = Literal["error", "add", "ignore"]

SchemaChangeCallback = Callable[[str, str, tuple[str, ...]], SchemaChange]
"""``callback(schema, table, columns)`` decides about columns that the publisher has and the target's table lacks."""

_BACKENDS: Final = 262_143  # PostgreSQL's MAX_BACKENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one process. Times are seconds, sizes bytes."""

    wal_receiver_status_interval: float = option(10.0, SECONDS, "longest time between reports of the position to the publisher", least=0)
    wal_receiver_timeout: float = option(60.0, TIME, "reconnect when nothing arrives from the publisher for this long; 0: never", least=0)
    wal_retrieve_retry_interval: float = option(5.0, TIME, "longest wait after an error; the first retries wait less", least=0.001)
    watchdog_timeout: float = option(
        60.0, TIME, "reconnect when nothing progresses for this long although the target is idle; 0: never", least=0, ours=True
    )
    max_sync_workers_per_subscription: int = option(2, WHOLE, "tables, or groups of small tables, copied at once", least=1, most=_BACKENDS)
    max_parallel_apply_workers_per_subscription: int = option(
        2, WHOLE, "streamed transactions applied at once before their end, and one that is not streamed; 0: none", least=0, most=1024
    )
    apply_workers: int = option(
        1,
        WHOLE,
        "sessions that apply waiting transactions at once, and commit them in the publisher's order; PostgreSQL targets",
        least=1,
        most=64,
        ours=True,
    )
    max_copy_workers_per_table: int = option(2, WHOLE, "connections that copy one large table together", least=1, most=_BACKENDS, ours=True)
    copy_range_size: int = option(256 * 1024**2, SIZE, "a larger table is copied in ranges of this size", least=64 * 1024, ours=True)
    logical_decoding_work_mem: int = option(64 * 1024**2, SIZE, "memory for changes before transactions spill to disk", least=64 * 1024)
    spool_directory: str | None = option(
        None, STRING, "where transactions spill", default_text="a private directory below the system's temporary one", ours=True
    )
    relay_log: str | None = option(
        None,
        STRING,
        "directory in which the stream is stored before it is applied, so that the publisher's WAL does not wait for the target",
        default_text="none: the stream is applied as it arrives",
        ours=True,
    )
    relay_log_size: int = option(50 * 1024**3, SIZE, "receiving pauses while the relay log is this large", least=512 * 1024, ours=True)
    verify_interval: float = option(
        0.0, TIME, "compare each table with the publisher's about this often, in the background; 0: never", least=0, ours=True
    )
    verify_max_rate: int = option(
        50_000, WHOLE, "rows per second that verify_interval reads at most on each side; 0: no limit", least=0, ours=True
    )
    batch_rows: int = option(50_000, WHOLE, "changes in a full batch of waiting transactions", least=1, ours=True)
    batch_size: int = option(8 * 1024**2, SIZE, "bytes in a full batch of waiting transactions", least=1024, ours=True)
    batch_delay: float = option(0.0, TIME, "how long a batch that is not full waits for more transactions", least=0, ours=True)
    create_tables: bool | None = option(
        None,
        BOOLEAN,
        "create tables that the target lacks, as they are published; not for a PostgreSQL target (pg_dump --schema-only)",
        default_text="true for an empty SQLite file, else false",
        ours=True,
        flag=True,
    )
    new_tables: NewTables = option(
        "ignore",
        choice("ignore", "copy"),
        "what to do about a table that joins the publications while the subscription runs",
        ours=True,
    )
    schema_change: SchemaChange | Literal["follow"] | SchemaChangeCallback = option(
        "error",
        choice("error", "add", "follow", "ignore"),
        "what to do about changed columns of the publisher (ignore is not for a PostgreSQL target)",
        ours=True,
    )
    """A word, or a function that decides for each table."""
    dropped_columns: DroppedColumns = option(
        "keep",
        choice("keep", "drop"),
        "with schema_change = follow: what the target does with a column that the publisher has dropped",
        ours=True,
    )

    @classmethod
    def parse(cls, items: Iterable[str]) -> Self:
        """Build from ``name=value`` texts.

        Raises:
            ConfigurationError: unknown name or value, or a value out of its range.
        """
        items = list(items)
        for item in items:
            if item.partition("=")[0].strip().lower() == "insert_conflict":
                raise ConfigurationError(
                    "insert_conflict was removed: a rule for conflicts does the same",
                    hint="-o conflict.insert_exists=apply_remote; to begin with rows in the target: -o copy_data=reconcile",
                )
        return cls(**parse_options(items, declared(cls), "unrecognized configuration parameter"))

    def __post_init__(self) -> None:
        for name, each in declared(type(self)).items():
            each.check_range(getattr(self, name))


SETTINGS: Final = declared(Settings)
"""All settings, by name."""
