"""Published tables that a subscription does not replicate.

They are found by comparing the publisher's list with the subscription's: at the start of a run, once a minute, and at the end of a run with
``until``. The stream is not enough: a table without changes never appears in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from subscriber.apply.tables.table_state import TO_BE_ADDED, TableStates
from subscriber.errors import PublisherError, RelationError
from subscriber.interfaces import TableName
from subscriber.subscription.spec import RunSpec
from subscriber.walreceiver.publication import other_identities, published_names

__all__ = ["LeftOutTables"]

_log = logging.getLogger(__name__)

_INTERVAL: Final = 60.0
_SHOWN: Final = 10
_PARTITION: Final = (
    'updates and deletes are lost, because the replica identity lacks columns of that of table "{}", which it is published as'
    " (hint: ALTER TABLE … REPLICA IDENTITY)"
)


class LeftOutTables:
    """Keeps :attr:`TableStates.left_out` up to date.

    Args:
        spec: the subscription.
        states: states of the subscription's tables.
    """

    def __init__(self, spec: RunSpec, states: TableStates) -> None:
        self._spec = spec
        self._states = states

    def compare(
        self,
        published: Mapping[TableName, int],
        reasons: Mapping[TableName, str] | None = None,
        partitions: Mapping[TableName, Sequence[TableName]] | None = None,
    ) -> None:
        """Note which published tables the subscription does not have, and log a warning about those that are new.

        Args:
            published: name and oid of each published table.
            reasons: why a table is left out, as far as known.
            partitions: of a published table, those whose updates and deletes are lost.
        """
        entries, before = self._states.entries(), dict(self._states.left_out)
        self._states.replicated |= {oid for name, oid in published.items() if name in entries}
        # a renamed table is still replicated; otherwise its next change in the stream raises an error that names it
        found = [name for name, oid in published.items() if name not in entries and oid not in self._states.replicated]
        known = {**before, **(reasons or {})}
        self._states.left_out = {name: known.get(name, self._states.new_reason) for name in sorted(found)}
        self._states.left_out |= {
            partition: _PARTITION.format(root) for root, members in (partitions or {}).items() if root in entries for partition in members
        }
        told = {*before, *(reasons or {})}
        new = {name: reason for name, reason in self._states.left_out.items() if name not in told and reason != TO_BE_ADDED}
        if new:
            _log.warning('subscription "%s": published tables are not replicated: %s', self._spec.name, _listed(new))

    async def run(self) -> None:
        """Compare once a minute, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            # the stream reports a publisher that is not available
            with contextlib.suppress(PublisherError):
                await self.look()

    async def look(self) -> None:
        """Ask the publisher, and compare.

        Raises:
            PublisherError: the publisher cannot be queried.
        """
        async with await self._spec.connect("tables") as session:
            mapping = self._spec.options.mapping
            published = await published_names(session, self._spec.publications, mapping)
            self.compare(published, partitions=await other_identities(session, self._spec.publications, mapping))

    def require_none(self) -> None:
        """Check that all published tables were replicated at the last comparison.

        Raises:
            RelationError: some are not.
        """
        left_out = self._states.left_out
        if left_out:
            word = "table is" if len(left_out) == 1 else "tables are"
            raise RelationError(
                f"{len(left_out)} published {word} not replicated: {_listed(left_out)}",
                hint="use --allow-missing-tables (Until.allow_missing_tables) to accept this",
            )


def _listed(tables: Mapping[TableName, str]) -> str:
    shown = [f'"{table}": {reason}' for table, reason in list(tables.items())[:_SHOWN]]
    more = len(tables) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")
