"""Find which relations a transaction changes, from the first bytes of its records.

Source: PostgreSQL manual, Logical Replication Message Formats (Insert, Update, Delete, Truncate).
"""

from __future__ import annotations

from typing import Final

from subscriber.transaction.model import Transaction

__all__ = ["changed_relations"]

_ROWS: Final = frozenset(b"IUD")
_TRUNCATE: Final = ord("T")


def changed_relations(transaction: Transaction) -> frozenset[int] | None:
    """Return the ids of the relations, without aborted subtransactions. None if a part is spilled: then they are not known."""
    if transaction.spilled:
        return None
    start = 5 if transaction.prefixed else 1
    found = {record[start : start + 4] for record in transaction.records if record[0] in _ROWS}
    for record in transaction.records:
        if record[0] == _TRUNCATE:
            # number of relations, options, ids
            ids = record[start + 5 :]
            found.update(ids[place : place + 4] for place in range(0, len(ids), 4))
    return frozenset(int.from_bytes(relation_id, "big") for relation_id in found)
