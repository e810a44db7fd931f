"""The parts of a table that is copied, and the SQL that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.interfaces.conditions import EVERY_ROW, SETTING, Condition
from subscriber.interfaces.values import TableName
from subscriber.protocol.quoting import quote_literal

__all__ = ["STORED_ANEW", "BlockRange", "CopyPart", "has_name"]

STORED_ANEW: Final = "c.relkind = 'r' AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid)"
"""For a relation c: its file as of the snapshot differs from its current file."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks ``first`` up to, but not including, ``end``; None: to the end of the table."""

    first: int
    end: int | None


@dataclass(frozen=True, slots=True)
class CopyPart:
    """The rows that one COPY or SELECT reads.

    Attributes:
        relation: the table itself or a partition of it.
        relation_id: its oid. When the name is read, it may belong to another relation.
        only: without its children.
        blocks: a range of it, or None for all.
        condition: which rows. The session that reads must have its values as settings.
    """

    relation: TableName
    relation_id: int
    only: bool
    blocks: BlockRange | None = None
    condition: Condition = EVERY_ROW

    def source(self, filters: Sequence[str] = ()) -> str:
        """``FROM … WHERE …`` for a SELECT of the rows. ``filters``: row filters of the publisher, combined with OR."""
        conditions = self.conditions(filters)
        where = f" WHERE {' AND '.join(f'({condition})' for condition in conditions)}" if conditions else ""
        return f"FROM {'ONLY ' if self.only else ''}{self.relation.quoted}{where}"

    def conditions(self, filters: Sequence[str] = ()) -> list[str]:
        """The conditions of :meth:`source`."""
        conditions = [" OR ".join(f"({expression})" for expression in filters)] if filters else []
        if condition := self.condition.sql(SETTING):
            conditions.append(condition)
        if self.blocks is not None:
            conditions.append(f"ctid >= '({self.blocks.first},0)'")
            if self.blocks.end is not None:
                conditions.append(f"ctid < '({self.blocks.end},0)'")
        return conditions

    def check_query(self) -> str:
        """The query that checks the relation, in the transaction that reads it. Both columns must be true after reading.

        The first column is true if the name belongs to the part's relation; check it before reading too. It detects a view or a
        partitioned table that took the name and that reads the part's relation, which is then locked as well. The lookup uses the current
        catalog, as the reading statement does; a SELECT from pg_class would use the snapshot. The relation's file must also be unchanged,
        because ``is_rewritten`` of the publisher's side does not see a partition that was detached meanwhile.

        The second column is true if the relation is locked: a part's transaction locks only what it reads. (LOCK TABLE by name would be
        no better, and needs SELECT on all columns.)
        """
        return f"SELECT {self.is_same()}, {self.is_held()}"

    def is_same(self) -> str:
        """The first column of :meth:`check_query`."""
        stored_anew = f"SELECT FROM pg_catalog.pg_class AS c WHERE c.oid = {self.relation_id} AND {STORED_ANEW}"
        return f"{has_name(self.relation, self.relation_id)} AND NOT EXISTS ({stored_anew})"

    def is_held(self) -> str:
        """The second column of :meth:`check_query`."""
        held = f"locktype = 'relation' AND relation = {self.relation_id} AND pid = pg_catalog.pg_backend_pid() AND granted"
        return f"EXISTS (SELECT FROM pg_catalog.pg_locks WHERE {held})"


def has_name(name: TableName, relation_id: int) -> str:
    """A condition: the name belongs to this relation now."""
    return f"COALESCE(pg_catalog.to_regclass({quote_literal(name.quoted)})::pg_catalog.oid = {relation_id}, false)"
