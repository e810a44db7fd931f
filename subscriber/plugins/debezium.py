"""``debezium``: the JSON envelope of Debezium's connector for PostgreSQL, without schema (``schemas.enable=false``).

Its options: ``topic.prefix`` (``source.name``), ``database.dbname`` (``source.db``). Rows have the values of
``decimal.handling.mode=string`` and ``time.precision.mode=adaptive_time_microseconds``:

* numbers for smallint, integer, bigint, oid and finite floats; true and false; base64 for bytea;
* days since 1970 for date, microseconds since 1970 for timestamp, ISO 8601 in UTC for timestamptz, microseconds for time;
* PostgreSQL's text for all others, and for infinity and what JSON or the type cannot hold.

An UPDATE that changes the key becomes ``d`` with the old key and ``c`` with the new row, as Debezium does. pgoutput does not tell the key
of a table with REPLICA IDENTITY FULL, so there it stays ``u``. ``source.lsn`` is the LSN of the commit, because pgoutput does not tell
that of the change.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from typing import Any, Final

from subscriber.errors import ConfigurationError
from subscriber.plugins.context import LogicalDecodingContext, OutputPluginOptions, OutputType, ReorderBufferTXN
from subscriber.protocol.lsn import POSTGRES_EPOCH, Lsn
from subscriber.protocol.messages import Relation
from subscriber.transaction.changes import UNCHANGED, Change, DeleteChange, InsertChange, Row, TruncateChange, UpdateChange

__all__ = ["UNAVAILABLE", "Debezium"]

UNAVAILABLE: Final = "__debezium_unavailable_value"
"""Stands for a large value that was not changed, and so was not sent."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OFFSET: Final = (POSTGRES_EPOCH - _EPOCH) // timedelta(microseconds=1)
_MICROSECOND: Final = timedelta(microseconds=1)
_INTEGERS: Final = frozenset({20, 21, 23, 26})
_FLOATS: Final = frozenset({700, 701})
_BOOL: Final = 16
_BYTEA: Final = 17
_DATE: Final = 1082
_TIME: Final = 1083
_TIMESTAMP: Final = 1114
_TIMESTAMPTZ: Final = 1184


class Debezium:
    """The plugin."""

    def startup(self, ctx: LogicalDecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        """Read the options."""
        ctx.unknown_options(("topic.prefix", "database.dbname"))
        options.output_type = OutputType.TEXTUAL
        self._name = ctx.output_plugin_options.get("topic.prefix") or "subscriber"
        self._database = ctx.output_plugin_options.get("database.dbname") or ""
        self._last_commit: Lsn | None = None

    def begin(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """Nothing: ``provide.transaction.metadata`` is off."""

    def commit(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """Remember the LSN, for ``source.sequence``."""
        self._last_commit = commit_lsn

    def change(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relation: Relation, change: Change) -> None:
        """One event, or two if the key changed."""
        match change:
            case InsertChange():
                self._event(ctx, txn, relation, "c", None, change.new)
            case UpdateChange() if change.key is not None:
                self._event(ctx, txn, relation, "d", change.key, None)
                self._event(ctx, txn, relation, "c", None, change.new)
            case UpdateChange():
                self._event(ctx, txn, relation, "u", change.old, change.new)
            case DeleteChange():
                self._event(ctx, txn, relation, "d", change.old if change.key is None else change.key, None)

    def truncate(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relations: Sequence[Relation], change: TruncateChange) -> None:
        """One event for each table."""
        for relation in relations:
            self._event(ctx, txn, relation, "t", None, None)

    def message(  # noqa: PLR0917 -- as PostgreSQL's callback
        self,
        ctx: LogicalDecodingContext,
        txn: ReorderBufferTXN | None,
        message_lsn: Lsn,
        transactional: bool,
        prefix: str,
        message: bytes,
    ) -> None:
        """A logical message."""
        content = {"prefix": prefix, "content": base64.b64encode(message).decode()}
        source = self._source(txn, message_lsn, "", "")
        _emit(ctx, {"op": "m", "ts_ms": _now(), "source": source, "message": content})

    def _event(  # noqa: PLR0917
        self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relation: Relation, op: str, before: Row | None, after: Row | None
    ) -> None:
        source = self._source(txn, txn.final_lsn, relation.namespace, relation.name)
        rows = {"before": _row(relation, before), "after": _row(relation, after)}
        _emit(ctx, {**rows, "source": source, "transaction": None, "op": op, "ts_ms": _now()})

    def _source(self, txn: ReorderBufferTXN | None, lsn: Lsn, schema: str, table: str) -> dict[str, Any]:
        last = None if self._last_commit is None else str(int(self._last_commit))
        return {
            "version": "subscriber",
            "connector": "postgresql",
            "name": self._name,
            "ts_ms": None if txn is None or txn.xact_time is None else (txn.xact_time + _OFFSET) // 1000,
            "snapshot": "false",
            "db": self._database,
            "sequence": json.dumps([last, str(int(lsn))], separators=(",", ":")),
            "schema": schema,
            "table": table,
            "txId": None if txn is None else txn.xid,
            "lsn": int(lsn),
            "xmin": None,
        }


def _emit(ctx: LogicalDecodingContext, event: dict[str, Any]) -> None:
    ctx.emit(json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def _now() -> int:
    return time.time_ns() // 1_000_000


def _row(relation: Relation, found: Row | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {column.name: _value(column.type_oid, found[column.name]) for column in relation.columns if column.name in found}


def _value(oid: int, value: object) -> Any:
    if value is None:
        return None
    if value is UNCHANGED:
        return UNAVAILABLE
    if not isinstance(value, str):
        raise ConfigurationError("debezium needs text, but the publisher sends binary values", hint="omit binary=true")
    if oid in _INTEGERS:
        return int(value)
    if oid == _BOOL:
        return value == "t"
    if oid == _BYTEA:
        return base64.b64encode(bytes.fromhex(value.removeprefix("\\x"))).decode()
    try:
        return _parsed(oid, value)
    except ValueError:
        # infinity, BC, a year of five digits, 24:00
        return value


def _parsed(oid: int, text: str) -> Any:
    if oid in _FLOATS:
        found = float(text)
        return found if abs(found) < float("inf") else text
    if oid == _DATE:
        return (date.fromisoformat(text) - _EPOCH.date()).days
    if oid == _TIME:
        found_time = clock.fromisoformat(text)
        return (datetime.combine(_EPOCH.date(), found_time, UTC) - _EPOCH) // _MICROSECOND
    if oid == _TIMESTAMP:
        return (datetime.fromisoformat(text).replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
    if oid == _TIMESTAMPTZ:
        return datetime.fromisoformat(text).astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return text
