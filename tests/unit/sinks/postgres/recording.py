"""What the PostgreSQL sink sends for messages of the publisher, recorded without a server."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

from subscriber.interfaces import TableName
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Message, Relation
from subscriber.sinks.apply_counters import Counted
from subscriber.sinks.described_relations import DescribedRelations
from subscriber.sinks.postgres.apply.transaction_sender import TransactionSender
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping, TargetColumn, TargetTable, map_relation
from subscriber.transaction.model import Transaction

INT4, TEXT = 23, 25
EQUALS = "OPERATOR(pg_catalog.=)"


def column(
    name: str,
    type_oid: int = TEXT,
    type_name: str = "text",
    *,
    generated: bool = False,
    identity_always: bool = False,
    equals: str | None = EQUALS,
    array: int = 0,
    delimiter: str = ",",
    cast: str | None = None,
) -> TargetColumn:
    return TargetColumn(name, type_oid, type_name, generated, identity_always, equals, array, delimiter, cast)


ID, VALUE, NUMBER = column("id", INT4, "integer"), column("v"), column("n", INT4, "integer")


def table(
    name: str = "t",
    columns: Sequence[TargetColumn] = (ID, VALUE, NUMBER),
    key: Sequence[str] = ("id",),
    *,
    namespace: str = "public",
    kind: str = "r",
    key_unique: bool = True,
    triggered: bool = False,
    role: str | None = None,
    referenced_by: Collection[str] = (),
    oid: int = 16400,
    watched: bool = True,
    other_unique: bool = False,
) -> TargetTable:
    """A table of the target. ``key``: columns of its primary key or replica identity."""
    return TargetTable(
        name=TableName(namespace, name),
        oid=oid,
        fingerprint=(oid, 1, True),
        kind=kind,
        role=role,
        rls_user=None,
        columns=tuple(columns),
        key=tuple((part, EQUALS) for part in key),
        key_unique=key_unique,
        referenced_by=frozenset(TableName("public", other) for other in referenced_by),
        triggered=triggered,
        watched=watched,
        other_unique=other_unique,
        tree=oid,
    )


@dataclass(frozen=True)
class Sent:
    """One statement that was sent, with its parameters. ``formats``: None if all are texts, else 1 for each binary one."""

    sql: str
    values: list[bytes | None]
    formats: list[int] | None
    statement: Statement


class RecordingPipeline:
    """Stands for :class:`Pipeline`: records what is sent, and answers nothing."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.full = False

    def send(
        self,
        statement: Statement,
        _context: object,
        values: Sequence[bytes | None] = (),
        formats: Sequence[int] | None = None,
        _size: int = 0,
    ) -> None:
        sql = statement.sql.decode("utf-8", "surrogateescape")
        self.sent.append(Sent(sql, list(values), None if formats is None else list(formats), statement))

    async def throttle(self) -> None:
        pass


class FixedTables(DescribedRelations):
    """Stands for :class:`RelationMap`: the target's tables are given, not read."""

    def __init__(self, tables: Sequence[TargetTable]) -> None:
        super().__init__()
        self.planner = self.log = self.owner = None
        self._tables = {table.name: table for table in tables}
        self._mappings: dict[int, RelationMapping] = {}

    def forget_targets(self) -> None:
        self._mappings.clear()

    def _forget_target(self, relation_id: int) -> None:
        self._mappings.pop(relation_id, None)

    def begin(self) -> None:
        pass

    def is_mapped(self, relation_id: int) -> bool:
        return relation_id in self._mappings

    async def mapping(self, relation: Relation, _queries: object) -> RelationMapping:
        if relation.relation_id not in self._mappings:
            table = self._tables[TableName(relation.namespace, relation.name)]
            self._mappings[relation.relation_id] = map_relation(relation, table)
        return self._mappings[relation.relation_id]

    async def is_wanted(self, _relation: Relation, _final_lsn: Lsn, *, by_name: bool) -> bool:
        return by_name


def transaction(*messages: Message) -> Transaction:
    records = [encode(message) for message in messages]
    return Transaction(
        xid=700, final_lsn=Lsn(0x1000), end_lsn=Lsn(0x1030), commit_time=0, prefixed=False, records=records, size=sum(map(len, records))
    )


async def send(
    tables: TargetTable | Sequence[TargetTable],
    *messages: Message,
    left_out: Collection[str] = (),
    differs: int | None = None,
    without_sets: Collection[TableName] = (),
) -> list[Sent]:
    """Send one transaction with these messages.

    Args:
        tables: the target's tables.
        messages: of the publisher, Relation messages included.
        left_out: tables whose changes the gate does not let through.
        differs, without_sets: see :class:`TransactionSender`.
    """
    pipeline = RecordingPipeline()
    relations = FixedTables([tables] if isinstance(tables, TargetTable) else tables)
    sender = TransactionSender(
        cast("RelationMap", relations),
        cast("Pipeline", pipeline),
        lambda relation, _: relation.name not in left_out,
        "pg_1",
        Counted(),
        without_sets=without_sets,
        differs=differs,
    )
    await sender.send([transaction(*messages)])
    sender.finish()
    return pipeline.sent


async def send_one(tables: TargetTable, *messages: Message, differs: int | None = None) -> Sent:
    """As :func:`send`, for a transaction that sends one statement."""
    (sent,) = await send(tables, *messages, differs=differs)
    return sent
