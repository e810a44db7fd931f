"""Give the target's names to the tables of a replication stream, and leave out tables and columns (:mod:`subscriber.config.mapping`).

The Relation message has the names, so it is the only one that a new name changes. Rows are changed only if their table lacks columns in
the target: then these are cut out of the bytes, by position. Everything that reads the stream sees the target's names and columns only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from subscriber.config.mapping import TableMapping, two_onto_one
from subscriber.config.table_names import Name, written, written_name
from subscriber.errors import ConfigurationError
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PAYLOAD
from subscriber.protocol.messages import Relation
from subscriber.protocol.tuples import keep_columns
from subscriber.transaction.relation_frames import RelationFrames

__all__ = ["MappedFrames", "key_left_out"]

_INSERT: Final = ord("I")


@dataclass(frozen=True, slots=True)
class _Table:
    """A table whose rows are changed.

    Attributes:
        name: on the publisher.
        kept: a byte for each column; 0: it is left out. Empty: the whole table is left out.
        lacking: a column of the replica identity that is left out, or None.
    """

    name: Name
    kept: bytes = b""
    lacking: str | None = None


class MappedFrames(RelationFrames[_Table]):
    """The mapping of one connection.

    Args:
        mapping: of the subscription.
        names: the publisher's names by those of the target, as far as known.
    """

    def __init__(self, mapping: TableMapping, names: dict[Name, Name]) -> None:
        super().__init__(rows=bool(mapping.excluded or mapping.columns))
        self._mapping = mapping
        self._names = dict(names)
        self._excluded: set[int] = set()

    def bind(self, relation: Relation) -> _Table | None:
        """Find out what the target lacks of a table.

        Raises:
            ConfigurationError: the table does not have a column that the mapping names.
        """
        name = relation.namespace, relation.name
        self._excluded.discard(relation.relation_id)
        if self._mapping.excludes(name):
            self._excluded.add(relation.relation_id)
            return _Table(name)
        columns = [column.name for column in relation.columns]
        self._mapping.require_columns(name, columns)
        kept = self._mapping.kept(name, columns)
        if len(kept) == len(columns):
            return None
        lacking = next((column.name for column in relation.columns if column.key and column.name not in kept), None)
        return _Table(name, bytes(column in kept for column in columns), lacking)

    def described(self, frame: bytes, relation: Relation, bound: _Table | None) -> bytes | None:
        """Describe a table with the names and the columns that it has in the target.

        Raises:
            ConfigurationError: another table has its name there.
        """
        if bound is not None and not bound.kept:
            return None
        mapping, name = self._mapping, (relation.namespace, relation.name)
        target = mapping.target_alone(name)
        if self._names.setdefault(target, name) != name:
            raise two_onto_one(self._names[target], name, target)
        if target == name and not mapping.changes_columns(name):
            return frame
        kept = relation.columns if bound is None else [column for column, keeps in zip(relation.columns, bound.kept, strict=True) if keeps]
        columns = tuple(replace(column, name=mapping.column(name, column.name)) for column in kept)
        return frame[:PAYLOAD] + encode(replace(relation, namespace=target[0], name=target[1], columns=columns))

    def row(self, frame: bytes, bound: _Table) -> bytes | None:
        """Cut columns out of a change.

        Raises:
            ConfigurationError: an UPDATE or DELETE would not find its row.
        """
        if not bound.kept:
            return None
        payload = frame[PAYLOAD:]
        if bound.lacking is not None and payload[0] != _INSERT:
            raise key_left_out(bound.name, bound.lacking)
        place = self.head + 4
        pieces = [frame[:PAYLOAD], payload[:place]]
        while place < len(payload):
            pieces.append(payload[place : place + 1])
            columns, place = keep_columns(payload, place + 1, bound.kept)
            pieces.append(columns)
        return b"".join(pieces)

    def truncate(self, frame: bytes, start: int) -> bytes | None:
        """Leave out tables of a TRUNCATE."""
        if not self._excluded:
            return frame
        # number of relations, options, ids
        ids = [frame[place : place + 4] for place in range(start + 5, len(frame), 4)]
        kept = [each for each in ids if int.from_bytes(each, "big") not in self._excluded]
        if len(kept) == len(ids):
            return frame
        return b"".join([frame[:start], len(kept).to_bytes(4, "big"), frame[start + 4 : start + 5], *kept]) if kept else None


def key_left_out(table: Name, column: str) -> ConfigurationError:
    """The error of a table whose replica identity has a column that is left out."""
    return ConfigurationError(
        f"column {written(column)} of table {written_name(table)} is left out, and belongs to the replica identity:"
        " an UPDATE or DELETE would not find its row",
        hint=f"add the column to columns.{written_name(table)}, or publish only inserts",
    )
