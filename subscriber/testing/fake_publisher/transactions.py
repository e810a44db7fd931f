"""Transactions of the fake publisher, written in Python.

A transaction writes each change to the WAL at once, as a server does. So a walsender may stream it before it ends. Its rows are visible to
others when it commits. Rows that it has changed are locked until it ends; another transaction that changes them gets an error instead of
waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from subscriber.errors import ConfigurationError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import TruncateOption
from subscriber.testing.fake_publisher.replication.wal import (
    Abort,
    Commit,
    CommitPrepared,
    DeleteRow,
    EmittedMessage,
    InsertRow,
    Origin,
    Prepare,
    Record,
    RollbackPrepared,
    TruncateTables,
    UpdateRow,
    WalContent,
)
from subscriber.testing.fake_publisher.tables import FakeTable, RowValues, TableShape, Types

__all__ = ["Database", "FakeTransaction"]


class Database(Protocol):
    """What a transaction needs of the publisher."""

    types: Types
    toast_threshold: int

    def find_table(self, name: str) -> FakeTable: ...

    def next_xid(self) -> int: ...

    def now(self) -> int: ...

    def write(self, content: WalContent, *, xid: int = 0, top_xid: int = 0, origin: Origin | None = None) -> Record: ...

    def check_command(self, shape: TableShape, operation: Literal["update", "delete"]) -> None: ...

    def began(self, transaction: FakeTransaction) -> None: ...

    def ended(self, transaction: FakeTransaction) -> None: ...


class _Subtransaction:
    """A savepoint: its xid once it has written, its children, and how to undo it."""

    def __init__(self) -> None:
        self.xid = 0
        self.children: list[int] = []
        self.undo: list[Callable[[], None]] = []


class FakeTransaction:
    """One transaction. ``async with publisher.transaction() as t`` commits at the end, or rolls back after an exception.

    Args:
        database: the publisher.
        origin: the replication origin that it was replicated from, or None.

    Attributes:
        xid: its id, or 0 before the first change.
        commit_lsn: start of its commit record, after the commit.
        end_lsn: end of that record: the position to wait for.
    """

    def __init__(self, database: Database, origin: Origin | None = None) -> None:
        self._database = database
        self._origin = origin
        self.xid = 0
        self.gid: str | None = None
        self.commit_lsn = self.end_lsn = Lsn(0)
        self.first_lsn: Lsn | None = None
        self._rows: dict[FakeTable, dict[int, RowValues | None]] = {}
        self._levels = [_Subtransaction()]
        self._truncated: list[FakeTable] = []
        self._state = "open"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._state == "open":
            if error is None:
                self.commit()
            else:
                self.rollback()

    @property
    def is_open(self) -> bool:
        """Whether it still runs, or is prepared."""
        return self._state in {"open", "prepared"}

    @property
    def xids(self) -> tuple[int, ...]:
        """Its id and those of its subtransactions that were not rolled back."""
        return (self.xid, *self._subxids())

    # --- changes

    def insert(self, table: str, rows: Iterable[Mapping[str, Any]] | None = None, /, **values: Any) -> None:
        """Insert rows: several as mappings, or one as keywords.

        Raises:
            ConfigurationError: a column does not exist, a value is missing, or the primary key exists.
        """
        found = self._table(table)
        for given in (values,) if rows is None else rows:
            row = found.row(self._database.types, given)
            self._check_unique(found, row, None)
            number = found.next_row
            found.next_row += 1
            self._change(InsertRow(found.shape, row))
            self._set(found, number, row)

    def update(self, table: str, where: Mapping[str, Any], /, **values: Any) -> int:
        """Change the rows whose columns have the values of ``where``; return their number.

        Raises:
            ConfigurationError: as :meth:`insert`, or another open transaction has changed a row.
        """
        found = self._table(table)
        found.check_columns(values)
        self._database.check_command(found.shape, "update")
        matching = self._matching(found, where)
        for number, row in matching:
            new = found.changed(self._database.types, row, values)
            self._check_unique(found, new, number)
            toasted = frozenset(
                column.name
                for column, value in zip(found.shape.columns, row, strict=True)
                if column.name not in values and self._is_toasted(value)
            )
            changed_key = any(row[found.shape.places[name]] != new[found.shape.places[name]] for name in found.shape.identity_columns)
            changed_key |= any(name in toasted for name in found.shape.identity_columns)
            old, is_key = self._old(found, row, key=changed_key)
            self._change(UpdateRow(found.shape, old, is_key, new, toasted))
            self._set(found, number, new)
        return len(matching)

    def delete(self, table: str, where: Mapping[str, Any], /) -> int:
        """Delete the rows whose columns have the values of ``where``; return their number.

        Raises:
            ConfigurationError: a column does not exist, or another open transaction has changed a row.
        """
        found = self._table(table)
        self._database.check_command(found.shape, "delete")
        matching = self._matching(found, where)
        for number, row in matching:
            old, is_key = self._old(found, row, key=True)
            self._change(DeleteRow(found.shape, old, is_key))
            self._set(found, number, None)
        return len(matching)

    def truncate(self, *tables: str, cascade: bool = False, restart_identity: bool = False) -> None:
        """Truncate tables together."""
        found = [self._table(table) for table in tables]
        for table in found:
            # it gets another file: a server describes it again, in this transaction and after it
            table.shape = replace(table.shape)
        self._truncated += found
        options = (TruncateOption.CASCADE if cascade else TruncateOption(0)) | (
            TruncateOption.RESTART_IDENTITY if restart_identity else TruncateOption(0)
        )
        self._change(TruncateTables(tuple(table.shape for table in found), options))
        for table in found:
            for number in [number for number, _ in self._visible(table)]:
                self._set(table, number, None)

    def message(self, prefix: str, content: bytes | str, *, transactional: bool = True) -> Lsn:
        """``pg_logical_emit_message``. Returns the LSN after it."""
        data = content.encode() if isinstance(content, str) else content
        body = EmittedMessage(transactional, prefix, data)
        return self._change(body).end if transactional else self._database.write(body).end

    def rows(self, table: str) -> list[dict[str, str | None]]:
        """The rows that this transaction sees, as text."""
        found = self._table(table)
        names = [column.name for column in found.shape.columns]
        return [
            {name: None if value is None else value.decode() for name, value in zip(names, row, strict=True)}
            for _, row in self._visible(found)
        ]

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A subtransaction. An exception rolls it back, and is raised again."""
        self._require_open()
        self._levels.append(_Subtransaction())
        depth = len(self._levels)
        try:
            yield
        except BaseException:
            if len(self._levels) >= depth:
                self.rollback_savepoint()
            raise
        if len(self._levels) >= depth:
            level = self._levels.pop()
            parent = self._levels[-1]
            parent.children += ([level.xid] if level.xid else []) + level.children
            parent.undo += level.undo

    def rollback_savepoint(self) -> None:
        """Roll back the innermost savepoint, inside its block.

        Raises:
            ConfigurationError: there is none.
        """
        self._require_open()
        if len(self._levels) == 1:
            raise ConfigurationError("ROLLBACK TO SAVEPOINT can only be used in a savepoint")
        level = self._levels.pop()
        self._undo(level)
        if level.xid:
            content = Abort(tuple(level.children), self._database.now())
            self._database.write(content, xid=level.xid, top_xid=self.xid, origin=self._origin)

    # --- the end

    def commit(self) -> Lsn:
        """Commit; return the end of the commit record. A transaction without changes writes nothing."""
        self._require_open()
        self._state = "committed"
        if self.xid:
            self._write_end(Commit(self._subxids(), self._database.now()))
        self._apply()
        return self.end_lsn

    def rollback(self) -> None:
        """Roll back."""
        self._require_open()
        self._state = "aborted"
        if self.xid:
            self._write_end(Abort(self._subxids(), self._database.now()))
        self._undo_all()
        self._forget()

    def prepare(self, gid: str) -> Lsn:
        """PREPARE TRANSACTION. Returns the end of its record. The changes become visible at :meth:`commit_prepared`."""
        self._require_open()
        self._xid()
        self._state, self.gid = "prepared", gid
        self._write_end(Prepare(gid, self._subxids(), self._database.now()))
        return self.end_lsn

    def commit_prepared(self) -> Lsn:
        """COMMIT PREPARED. Returns the end of its record.

        Raises:
            ConfigurationError: the transaction is not prepared.
        """
        gid = self._prepared_gid()
        self._state = "committed"
        self._write_end(CommitPrepared(gid, self._subxids(), self._database.now()))
        self._apply()
        return self.end_lsn

    def rollback_prepared(self) -> Lsn:
        """ROLLBACK PREPARED. Returns the end of its record."""
        gid = self._prepared_gid()
        self._state = "aborted"
        self._write_end(RollbackPrepared(gid, self._subxids(), self._database.now()))
        self._undo_all()
        self._forget()
        return self.end_lsn

    # --- parts

    def _require_open(self) -> None:
        if self._state != "open":
            raise ConfigurationError(f"the transaction is {self._state}")

    def _prepared_gid(self) -> str:
        if self._state != "prepared" or self.gid is None:
            raise ConfigurationError(f"the transaction is {self._state}, not prepared")
        return self.gid

    def _table(self, name: str) -> FakeTable:
        self._require_open()
        return self._database.find_table(name)

    def _xid(self) -> int:
        """The xid of the current subtransaction; its parents get theirs first, as in AssignTransactionId."""
        for level in self._levels:
            if not level.xid:
                level.xid = self._database.next_xid()
                if level is self._levels[0]:
                    self.xid = level.xid
        return self._levels[-1].xid

    def _change(self, content: WalContent) -> Record:
        self._require_open()
        xid = self._xid()
        if self.first_lsn is None:
            # before the first record, so that a slot that is created meanwhile waits for this transaction
            self._database.began(self)
        record = self._database.write(content, xid=xid, top_xid=self.xid, origin=self._origin)
        if self.first_lsn is None:
            self.first_lsn = record.start
        return record

    def _write_end(self, content: WalContent) -> None:
        record = self._database.write(content, xid=self.xid, top_xid=self.xid, origin=self._origin)
        self.commit_lsn, self.end_lsn = record.start, record.end
        if self.first_lsn is None:
            self.first_lsn = record.start

    def _subxids(self) -> tuple[int, ...]:
        found = list(self._levels[0].children)
        for level in self._levels[1:]:
            found += ([level.xid] if level.xid else []) + level.children
        return tuple(found)

    def _apply(self) -> None:
        for table in self._truncated:
            table.shape = replace(table.shape)
        for table, changes in self._rows.items():
            for number, row in changes.items():
                if row is None:
                    table.rows.pop(number, None)
                else:
                    table.rows[number] = row
        self._forget()

    def _forget(self) -> None:
        for table, changes in self._rows.items():
            for number in changes:
                table.locks.pop(number, None)
        self._rows.clear()
        self._database.ended(self)

    def _undo_all(self) -> None:
        for level in reversed(self._levels):
            self._undo(level)

    def _undo(self, level: _Subtransaction) -> None:
        for undo in reversed(level.undo):
            undo()

    def _set(self, table: FakeTable, number: int, row: RowValues | None) -> None:
        changes = self._rows.setdefault(table, {})
        known, before = number in changes, changes.get(number)
        key = None if row is None else table.primary_key_of(row)
        holder = None if key is None else table.by_key.get(key)

        def undo() -> None:
            if known:
                changes[number] = before
            else:
                del changes[number]
                table.locks.pop(number, None)
            if key is not None and holder is not None:
                table.by_key[key] = holder

        self._levels[-1].undo.append(undo)
        table.locks[number] = self
        changes[number] = row
        if key is not None:
            table.by_key[key] = number

    def _visible(self, table: FakeTable) -> Iterator[tuple[int, RowValues]]:
        changes = self._rows.get(table, {})
        for number, row in table.rows.items():
            if number not in changes:
                yield number, row
        for number, changed in changes.items():
            if changed is not None:
                yield number, changed

    def _seen(self, table: FakeTable, number: int) -> RowValues | None:
        changes = self._rows.get(table, {})
        return changes[number] if number in changes else table.rows.get(number)

    def _matching(self, table: FakeTable, where: Mapping[str, Any]) -> list[tuple[int, RowValues]]:
        table.check_columns(where)
        shape = table.shape
        wanted = {shape.places[name]: self._database.types.text(shape.columns[shape.places[name]], value) for name, value in where.items()}
        candidates: Iterable[tuple[int, RowValues]] = self._visible(table)
        if shape.primary_key and set(shape.primary_key) <= set(where):
            number = table.by_key.get(tuple(wanted[shape.places[name]] for name in shape.primary_key))
            self._require_unlocked(table, number)
            row = None if number is None else self._seen(table, number)
            candidates = [] if number is None or row is None else [(number, row)]
        found = [(number, row) for number, row in candidates if all(row[place] == value for place, value in wanted.items())]
        for number, _ in found:
            self._require_unlocked(table, number)
        return found

    def _require_unlocked(self, table: FakeTable, number: int | None) -> None:
        if number is not None and table.locks.get(number, self) is not self:
            raise ConfigurationError(
                f"another open transaction has changed this row of {table.shape.name}",
                hint="end it first: the fake publisher does not wait",
            )

    def _check_unique(self, table: FakeTable, row: RowValues, own: int | None) -> None:
        key = table.primary_key_of(row)
        number = None if key is None else table.by_key.get(key)
        if number is None or number == own:
            return
        self._require_unlocked(table, number)
        seen = self._seen(table, number)
        if seen is not None and table.primary_key_of(seen) == key:
            raise ConfigurationError(f'duplicate key value violates unique constraint "{table.shape.name.name}_pkey"')

    def _is_toasted(self, value: bytes | None) -> bool:
        return value is not None and len(value) > self._database.toast_threshold

    def _old(self, table: FakeTable, row: RowValues, *, key: bool) -> tuple[RowValues | None, bool]:
        """The old row as ExtractReplicaIdentity gives it, and whether it is the key only."""
        shape = table.shape
        if shape.replica_identity == "f":
            return row, False
        if not key or not shape.identity_columns:
            return None, True
        kept = {shape.places[name] for name in shape.identity_columns}
        return tuple(value if place in kept else None for place, value in enumerate(row)), True
