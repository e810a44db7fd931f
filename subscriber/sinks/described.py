"""What the publisher described, to a sink that reads transactions: relations by their ids.

It outlives a transaction: Relation messages count from where they come, and are not sent again. What a transaction that was rolled back
described comes again with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Relation, Tag
from subscriber.transaction.model import Transaction

__all__ = ["DescribedRelations"]

_RELATION: Final = bytes([Tag.RELATION])


class DescribedRelations(ABC):
    """Remote relations by id. Whoever extends it keeps what it makes of each with the target."""

    def __init__(self) -> None:
        self._remote: dict[int, Relation] = {}

    @abstractmethod
    def forget_targets(self) -> None:
        """Read the target's tables again when they are needed next."""

    @abstractmethod
    def _forget_target(self, relation_id: int) -> None:
        """The same for one: it was described anew."""

    def remembered(self) -> dict[int, Relation]:
        """The relations as known now, for :meth:`restore`."""
        return dict(self._remote)

    def restore(self, remembered: dict[int, Relation]) -> None:
        """Go back to what was known before transactions that were rolled back. The target's tables are read again."""
        self._remote = dict(remembered)
        self.forget_targets()

    def define(self, relation: Relation) -> None:
        """A Relation message came."""
        self._remote[relation.relation_id] = relation
        self._forget_target(relation.relation_id)

    async def learn(self, transaction: Transaction) -> None:
        """Read what a transaction describes, and nothing else of it: the publisher will not describe it again.

        Raises:
            ProtocolError: a Relation message that is none.
            SpoolError: its spilled part cannot be read.
        """
        async for chunk in transaction.chunks():
            for record in chunk:
                if record[:1] == _RELATION and isinstance(message := decode(record, in_stream=transaction.prefixed), Relation):
                    self.define(message)

    def remote(self, relation_id: int) -> Relation:
        """What the publisher said of a relation.

        Raises:
            ProtocolError: nothing.
        """
        try:
            return self._remote[relation_id]
        except KeyError:
            raise ProtocolError(f"no relation map entry for remote relation ID {relation_id}") from None
