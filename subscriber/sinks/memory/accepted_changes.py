"""Read the changes of a transaction for a target in memory: those that the gate accepts, each with its relation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from subscriber.errors import ProtocolError
from subscriber.interfaces import ApplyStatistics, RelationGate
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Delete, Insert, LogicalMessage, Relation, Truncate, Type, Update
from subscriber.transaction.model import Transaction
from subscriber.types import TypeRegistry

__all__ = ["Change", "Relations"]


@dataclass(frozen=True, slots=True)
class Change:
    """One change.

    Attributes:
        message: the message as received.
        relations: the relations of the change. Only TRUNCATE has several, and only those that the gate accepts.
    """

    message: Insert | Update | Delete | Truncate
    relations: tuple[Relation, ...]


class Relations:
    """The relations (by id) and types that the publisher described.

    Attributes:
        types: types of the publisher.
    """

    def __init__(self) -> None:
        self.types = TypeRegistry()
        self._known: dict[int, Relation] = {}

    async def read(
        self, transaction: Transaction, gate: RelationGate, statistics: ApplyStatistics
    ) -> tuple[list[Change], Mapping[int, Relation]]:
        """The changes that the gate accepts, and the relations that the transaction describes.

        The relations become known only by :meth:`learn`, so that a transaction that fails does not change them.

        Raises:
            ProtocolError: an invalid record, or a change of a relation that was never described.
            SpoolError
        """
        known = dict(self._known)
        described: dict[int, Relation] = {}
        changes: list[Change] = []
        async for chunk in transaction.chunks():
            for record in chunk:
                match decode(record, in_stream=transaction.prefixed):
                    case Relation() as relation:
                        known[relation.relation_id] = described[relation.relation_id] = relation
                    case Type(oid, namespace, name):
                        self.types.define(oid, namespace, name)
                    case Insert() | Update() | Delete() as message:
                        relation = _of(known, message.relation_id)
                        if _wanted(relation, transaction, gate, statistics):
                            changes.append(Change(message, (relation,)))
                    case Truncate() as message:
                        relations = [_of(known, relation_id) for relation_id in message.relation_ids]
                        wanted = tuple(relation for relation in relations if _wanted(relation, transaction, gate, statistics))
                        if wanted:
                            changes.append(Change(message, wanted))
                    case LogicalMessage():
                        pass
                    case other:
                        raise ProtocolError(f"a {type(other).__name__} message among the changes of a transaction")
        return changes, described

    def learn(self, described: Mapping[int, Relation]) -> None:
        """Add the relations that a transaction described."""
        self._known.update(described)


def _of(known: Mapping[int, Relation], relation_id: int) -> Relation:
    try:
        return known[relation_id]
    except KeyError:
        raise ProtocolError(f"no relation map entry for remote relation ID {relation_id}") from None


def _wanted(relation: Relation, transaction: Transaction, gate: RelationGate, statistics: ApplyStatistics) -> bool:
    wanted = bool(gate(relation, transaction.final_lsn))
    if not wanted:
        statistics.skipped_tables.add(f"{relation.namespace}.{relation.name}")
    return wanted
