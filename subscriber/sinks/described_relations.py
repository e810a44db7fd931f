"""The relations that the publisher described, by id, for a sink that reads transactions.

A relation stays known after its transaction, because the publisher does not send the Relation message again. After a rollback, the
relations of the transaction are removed, because they are read again with it.

The publisher may describe a relation again although nothing changed: with ``publish_via_partition_root``, once for each partition that has
a change. Such a message has no effect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Final

from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Relation, Tag
from subscriber.transaction.model import Transaction

__all__ = ["DescribedRelations"]

_RELATION: Final = bytes([Tag.RELATION])


class DescribedRelations(ABC):
    """Remote relations by id. Subclasses also store how each relation maps to the target."""

    def __init__(self) -> None:
        self._remote: dict[int, Relation] = {}

    @abstractmethod
    def forget_targets(self) -> None:
        """Forget all target tables, so that they are read again when they are needed next."""

    @abstractmethod
    def _forget_target(self, relation_id: int) -> None:
        """Forget the target table of a relation that was described again."""

    def remembered(self) -> dict[int, Relation]:
        """A copy of the known relations, for :meth:`restore`."""
        return dict(self._remote)

    def restore(self, remembered: dict[int, Relation]) -> None:
        """Restore the relations known before transactions that were rolled back. The target's tables are read again."""
        self._remote = dict(remembered)
        self.forget_targets()

    follows = False
    """Whether each Relation message is compared with the publisher's catalog, also one that has no effect otherwise."""

    def define(self, relation: Relation) -> bool:
        """Store the relation of a Relation message. Return whether it differs from the one that is known."""
        known = self._remote.get(relation.relation_id)
        if known is not None and not self.follows and (known == relation or replace(known, xid=relation.xid) == relation):
            return False
        self._remote[relation.relation_id] = relation
        self._forget_target(relation.relation_id)
        return True

    async def learn(self, transaction: Transaction) -> None:
        """Read only the Relation messages of a transaction. This is needed because the publisher does not send them again.

        Raises:
            ProtocolError: an invalid Relation message.
            SpoolError: the transaction's spool file cannot be read.
        """
        if transaction.discarded:
            return  # it was applied or skipped here before
        async for chunk in transaction.chunks():
            for record in chunk:
                if record[:1] == _RELATION and isinstance(message := decode(record, in_stream=transaction.prefixed), Relation):
                    self.define(message)

    def remote(self, relation_id: int) -> Relation:
        """The relation with this id, as the publisher described it.

        Raises:
            ProtocolError: the publisher did not describe it.
        """
        try:
            return self._remote[relation_id]
        except KeyError:
            raise ProtocolError(f"no relation map entry for remote relation ID {relation_id}") from None
