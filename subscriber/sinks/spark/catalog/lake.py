"""The documents of a lake: ``subscriber.json``, ``catalog.json`` and ``position.json`` in its directory.

Without ``subscriber.json`` there is no lake. ``catalog.json`` is replaced as a whole. ``position.json`` has the position that was set, or
moved without data; the last manifest counts if it ends further. It also has the directories of prepared transactions that were received.
``docs/reference/lake.md`` lists all files of a lake.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from subscriber.errors import RelationError, TargetError
from subscriber.interfaces import Position, TableEntry, TableName, TableState, TwoPhaseState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.files.documents import json_text, parse_document, write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import manifest_ends

__all__ = [
    "APPLIER_LOCK",
    "COPY_DOCUMENT",
    "IDENTITY",
    "LANDING",
    "VERB_LOCK",
    "WRITER_LOCK",
    "Lake",
    "LakeState",
    "LakeTable",
    "abandoned_copies",
    "copied_again",
    "copy_directory",
    "with_table",
    "with_tables",
    "without_table",
]

IDENTITY: Final = "subscriber.json"
CATALOG: Final = "catalog.json"
POSITION: Final = "position.json"
_COPY: Final = re.compile(r"(\d+)-(\d+)")
LANDING: Final = "landing"
WRITER_LOCK: Final = "lock"
VERB_LOCK: Final = ".verb.lock"
APPLIER_LOCK: Final = "applier.lock"
COPY_DOCUMENT: Final = "copy.json"
"""In the directory of a copy, see ``copy/copied_rows.py``."""

_UNFINISHED: Final = frozenset({TableState.INIT, TableState.DATASYNC})


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeTable:
    """One table of the subscription.

    Attributes:
        id: names the table in this lake, and never changes.
        generation: increases with every copy that is begun.
        added: the subscription's position when the table was added. A table that is not copied begins there.
        position: its own position while it is synchronized.
        until: of a removed table: what was landed for it up to here still belongs to it.
        begun: of a table that was removed, and added again to be copied: the generation of the last copy that began and did not finish.
        columns: name, oid and modifier of the type, of the columns of its copy, or that changes had since. Empty: unknown.
        gap: why its rows lack values, until it is copied again.
    """

    id: int
    entry: TableEntry
    generation: int = 0
    added: Lsn
    position: Position | None = None
    until: Lsn | None = None
    begun: int = 0
    columns: tuple[tuple[str, int, int], ...] = ()
    gap: str | None = None

    @property
    def is_synchronized(self) -> bool:
        """Whether its copy is finished, and its changes come with those of the other tables."""
        return self.entry.is_synchronized


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeState:
    """Content of ``catalog.json``. ``removed`` has the tables that left the subscription or will be copied again."""

    slot_name: str | None = None
    publications: tuple[str, ...] = ()
    two_phase: TwoPhaseState = TwoPhaseState.DISABLED
    next_id: int = 1
    tables: Mapping[TableName, LakeTable] = field(default_factory=dict)
    removed: Mapping[TableName, LakeTable] = field(default_factory=dict)


class Lake:
    """The documents of one lake, read once and cached. Every change is durable before it is visible here.

    Attributes:
        target_identifier: identifies this lake among all lakes.
        position: the position that was set; None before the first.
        received: the directories of prepared transactions that were received. If one does not exist, the transaction was lost.
        dropped: whether the subscription was dropped. Landed changes may still be applied, and the tables may be read.
        is_certain: whether :attr:`state` is what is stored. An error of the last :meth:`change` does not say whether it was stored.
    """

    def __init__(self, storage: Storage, name: str, target_identifier: str) -> None:
        self.storage = storage
        self.name = name
        self.target_identifier = target_identifier
        self.state = LakeState()
        self.position: Position | None = None
        self.received: frozenset[str] = frozenset()
        self.dropped = False
        self.is_certain = True
        self._texts: dict[TableName, tuple[LakeTable, str]] = {}

    @classmethod
    def find(cls, storage: Storage) -> Self | None:
        """Find the lake in a directory. None if there is none. Nothing is created."""
        identity = parse_document(storage, IDENTITY, lambda data: (data["subscription"], data["target_identifier"], bool(data["dropped"])))
        if identity is None:
            entries = storage.entries("")
            if IDENTITY in entries:
                return cls.find(storage)  # another process has created it since
            _require_empty(storage, entries)
            return None
        name, identifier, dropped = identity
        lake = cls(storage, name, identifier)
        lake.dropped = dropped
        position = parse_document(storage, POSITION, lambda data: (_position(data), frozenset(data["received"])))
        lake.position, lake.received = position or (None, frozenset())
        lake._read_state()
        return lake

    def _read_state(self) -> None:
        """Read the catalog. It was stored before the first position."""
        state = parse_document(self.storage, CATALOG, _state)
        if state is None and self.position is not None:
            raise TargetError(f"{self.storage.what(CATALOG)} is gone", hint="restore it from a backup, or start over in a new directory")
        self.state, self.is_certain = state or LakeState(), self.is_certain and state is not None

    @classmethod
    def make(cls, storage: Storage, name: str) -> Self:
        """Create a lake in an empty or missing directory."""
        storage.make_directory("")
        # slot names contain this number; they have 63 characters for it and two oids
        lake = cls(storage, name, str(secrets.randbits(63)))
        lake.identify(name)
        lake.is_certain = False  # nothing is stored
        return lake

    def has(self, name: str) -> bool:
        """Whether the lake has the subscription of this name."""
        return self.name == name and not self.dropped

    def identify(self, name: str, *, dropped: bool = False) -> None:
        """Give the subscription another name, or mark it as dropped."""
        document = {"subscription": name, "target_identifier": self.target_identifier, "dropped": dropped}
        write_document(self.storage, IDENTITY, document)
        self.name, self.dropped = name, dropped

    def change(self, change: Callable[[LakeState], LakeState]) -> None:
        """Store a new state, which ``change`` makes of the stored one.

        If the last call failed, the state is read again first: an error does not tell whether the state was stored, and the applier may
        have acted on it.
        """
        if not self.is_certain:
            self._read_state()
        state = change(self.state)
        if self.is_certain and state == self.state:
            return
        try:
            write_document(self.storage, CATALOG, self._state_text(state))
        except BaseException:
            self.is_certain = False
            raise
        self.state, self.is_certain = state, True

    def _state_text(self, state: LakeState) -> str:
        """The JSON text of a state. Tables that did not change are not formatted again: each table changes its state several times."""
        known, self._texts = self._texts, {}
        for name, table in state.tables.items():
            text = known.get(name)
            self._texts[name] = text if text is not None and text[0] is table else (table, _table_text(name, table))
        parts = {
            "slot_name": json_text(state.slot_name),
            "publications": json_text(state.publications),
            "two_phase": json_text(state.two_phase.value),
            "next_id": json_text(state.next_id),
            "tables": f"[{', '.join([text for _, text in self._texts.values()])}]",
            "removed": f"[{', '.join([_table_text(name, table) for name, table in state.removed.items()])}]",
        }
        return f"{{{', '.join([f'{json_text(name)}: {parts[name]}' for name in sorted(parts)])}}}"

    def settle(self) -> None:
        """Find out which state is stored, if the last :meth:`change` failed. Durable on return."""
        if not self.is_certain:
            self.change(lambda state: state)

    def change_table(self, name: TableName, **changes: Any) -> None:
        """Store new values of :class:`LakeTable`'s attributes. Raises as :meth:`table`."""
        self.change(lambda state: with_tables(state, {name: replace(_table_of(state, name), **changes)}))

    def table(self, name: TableName) -> LakeTable:
        """Return a table of the subscription. If it does not have this table, raise RelationError."""
        return _table_of(self.state, name)

    @property
    def applications(self) -> str:
        """The beginning of the names of this lake's Delta applications, which state LSNs in commits."""
        return f"subscriber-{self.target_identifier}-"

    def application(self, table: LakeTable) -> str:
        """The Delta application that commits a table since its last copy."""
        return f"{self.applications}{table.id}-{table.generation}"

    def log_applications(self, table: LakeTable) -> list[str]:
        """The Delta applications that append to a table's change log: one for each copy. The last one appends now."""
        return [f"{self.applications}{table.id}-{number}-log" for number in range(table.generation + 1)]

    @property
    def position_lsn(self) -> Lsn:
        """The LSN of :attr:`position`. Before the first, it is :data:`INVALID_LSN`."""
        return self.position.lsn if self.position is not None else INVALID_LSN

    def landed(self) -> Lsn | None:
        """The LSN up to which everything is durable: the position, or the end of the last manifest. None without a position.

        A landing zone that cannot be read is ignored here. The landing process and the applier report what is wrong with it.
        """
        if self.position is None:
            return None
        try:
            ends = manifest_ends(self.storage, LANDING)
        except TargetError:
            return self.position.lsn
        return Lsn(max([*ends, int(self.position.lsn)]))

    def set_position(self, position: Position, received: frozenset[str] | None = None) -> None:
        """Store the position, and which prepared transactions were received; None keeps those that are stored."""
        if self.position is None:
            self.settle()  # from now on, a missing catalog is an error
        received = self.received if received is None else received
        write_document(self.storage, POSITION, {**_position_json(position), "received": sorted(received)})
        self.position, self.received = position, received

    def forget_received(self, directory: str) -> None:
        """Remove the name of a prepared transaction that has ended."""
        if directory in self.received and self.position is not None:
            self.set_position(self.position, self.received - {directory})


def lake_of_another(lake: Lake, name: str) -> TargetError:
    """The error for a lake that does not belong to the subscription of this name."""
    dropped = f'belonged to subscription "{lake.name}", which was dropped'
    ownership = dropped if lake.dropped else f'belongs to subscription "{lake.name}", not "{name}"'
    return TargetError(f"the lake in {lake.storage.place} {ownership}", hint="use a separate directory for each subscription")


def copy_directory(table: LakeTable) -> str:
    """The directory of a table's copy and its own batches."""
    return f"copy/{table.id}-{table.generation}"


def abandoned_copies(storage: Storage, known: Sequence[LakeTable]) -> list[str]:
    """The directories of copies that were started again. An unknown copy may be of a table that was just added."""
    kept = {copy_directory(table) for table in known}
    newest: dict[str, int] = {}
    for table in known:
        newest[str(table.id)] = max(table.generation, newest.get(str(table.id), 0))
    return [
        f"copy/{name}"
        for name in storage.entries("copy")
        if (match := _COPY.fullmatch(name)) and f"copy/{name}" not in kept and int(match[2]) < newest.get(match[1], 0)
    ]


def with_tables(state: LakeState, tables: Mapping[TableName, LakeTable]) -> LakeState:
    """Replace tables."""
    return replace(state, tables={**state.tables, **tables})


def _table_of(state: LakeState, name: TableName) -> LakeTable:
    found = state.tables.get(name)
    if found is None:
        raise RelationError(
            f'table "{name}" is not part of the subscription', hint="it is no longer published, or was removed in the meantime"
        )
    return found


def without_table(state: LakeState, name: TableName, position: Lsn) -> LakeState:
    """Remove a table. What was landed for it up to the position still belongs to it."""
    known = state.tables.get(name)
    if known is None:
        return state
    was = state.removed.get(name)
    if known.entry.state not in _UNFINISHED:
        was = replace(known, position=None, until=max(position, known.entry.lsn or INVALID_LSN))
    elif was is None or was.entry.state in _UNFINISHED:
        was = replace(known, position=None)
    else:
        # the unfinished copy has not replaced anything
        was = replace(was, begun=known.generation)
    rest = {other: table for other, table in state.tables.items() if other != name}
    return replace(state, tables=rest, removed={**state.removed, name: was})


def with_table(state: LakeState, table: TableName, entry: TableEntry, position: Lsn) -> LakeState:
    """Add a table, which begins at the position. A removed one of that name keeps its number."""
    was = state.removed.get(table)
    removed = {name: known for name, known in state.removed.items() if name != table}
    if was is not None and entry.state is TableState.INIT:
        # until the copy is finished, what was landed before belongs to the removed table
        removed[table] = was
        added = LakeTable(id=was.id, entry=entry, generation=max(was.generation, was.begun), added=position)
    elif was is not None and (not was.generation or was.entry.state not in _UNFINISHED):
        added = replace(was, entry=entry, until=None)
    else:
        # the table was never there, or no copy of it was ever finished
        added = LakeTable(id=state.next_id, entry=entry, added=position)
        state = replace(state, next_id=state.next_id + 1)
    return replace(state, tables={**state.tables, table: added}, removed=removed)


def copied_again(state: LakeState, names: Iterable[TableName], position: Lsn) -> LakeState:
    """Let tables be copied again, and begin at the position."""
    for name in names:
        state = with_table(without_table(state, name, position), name, TableEntry(TableState.INIT), position)
    return state


def _require_empty(storage: Storage, entries: Sequence[str]) -> None:
    known = {LANDING, "copy", "prepared", "tables", "log", "history", WRITER_LOCK}
    # a verb that was killed while it created a lake leaves the definition
    strange = sorted(name for name in entries if name not in {WRITER_LOCK, "definition.json"} and not name.startswith("."))
    if strange:
        hint = f"restore {IDENTITY} from a backup" if known & set(strange) else "use an empty directory for the lake"
        raise TargetError(f'directory {storage.place} is not empty and is not a lake: it contains "{strange[0]}"', hint=hint)


def _table_text(name: TableName, table: LakeTable) -> str:
    return json_text(
        {
            "name": [name.namespace, name.name],
            "id": table.id,
            "state": table.entry.state.value,
            "lsn": None if table.entry.lsn is None else str(table.entry.lsn),
            "generation": table.generation,
            "added": str(table.added),
            "position": None if table.position is None else _position_json(table.position),
            "until": None if table.until is None else str(table.until),
            "begun": table.begun,
            "columns": table.columns,
            "gap": table.gap,
        }
    )


def _state(data: Mapping[str, Any]) -> LakeState:
    return LakeState(
        slot_name=data["slot_name"],
        publications=tuple(data["publications"]),
        two_phase=TwoPhaseState(data["two_phase"]),
        next_id=data["next_id"],
        tables={TableName(*item["name"]): _table(item) for item in data["tables"]},
        removed={TableName(*item["name"]): _table(item) for item in data["removed"]},
    )


def _table(item: Mapping[str, Any]) -> LakeTable:
    return LakeTable(
        id=item["id"],
        entry=TableEntry(TableState(item["state"]), None if item["lsn"] is None else Lsn.parse(item["lsn"])),
        generation=item["generation"],
        added=Lsn.parse(item["added"]),
        position=None if item["position"] is None else _position(item["position"]),
        until=None if item["until"] is None else Lsn.parse(item["until"]),
        begun=item["begun"],
        columns=tuple((name, oid, modifier) for name, oid, modifier in item["columns"]),
        gap=item["gap"],
    )


def _position_json(position: Position) -> dict[str, Any]:
    return {"slot_name": position.slot_name, "system": position.system_identifier, "timeline": position.timeline, "lsn": str(position.lsn)}


def _position(data: Mapping[str, Any]) -> Position:
    return Position(data["slot_name"], data["system"], data["timeline"], Lsn.parse(data["lsn"]))
