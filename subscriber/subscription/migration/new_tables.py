"""Tables and partitions that are created while a migration runs: published, created in the target, and added to the subscription."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.catalog import Observation
from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName, TableState
from subscriber.subscription.management.alter import alter_subscription
from subscriber.subscription.migration.migrated_schema import MigratedSchema
from subscriber.subscription.migration.spec import MigrationSpec, Tell
from subscriber.walreceiver.new_publication import extend_publication
from subscriber.walreceiver.publication import published_names

__all__ = ["NewTables"]


class NewTables:
    """Finds them.

    Args:
        spec: of the migration.
        schema: creates them in the target.
        tell: is given a line for each, perhaps again and again.

    Attributes:
        unfit: an error for each table that is not moved, or whose changes the publisher rejects, until a user corrects it.
    """

    def __init__(self, spec: MigrationSpec, schema: MigratedSchema, tell: Tell) -> None:
        self._spec = spec
        self._schema = schema
        self._tell = tell
        self._created = set[TableName]()
        self.unfit = list[ConfigurationError]()

    async def create(self) -> bool:
        """Create them in the target, because apply stops at a change of a table that does not exist.

        They are added to the subscription later, because that interrupts the copies of other tables.

        Returns:
            Whether there are any.
        """
        found = await self._spec.observed()
        if found is None or not (new := await self._find(found)) or self._created.issuperset(new):
            return False
        await self._schema.add_tables(only_tables=True)
        self._created.update(new)
        return True

    async def add(self) -> Sequence[TableName]:
        """Add published tables that the subscription lacks, with their schema. Return the tables that are not ready."""
        found = await self._spec.observed()
        if found is None:
            return ()
        new = await self._find(found)
        waiting = [each.table for each in found.tables if each.entry.state not in {TableState.READY, TableState.PARKED}]
        if not new:
            return waiting
        listed = ", ".join(f'"{table}"' for table in new)
        self._tell(f"new tables of the publisher are added: {listed}")
        await self._schema.add_tables()
        async with alter_subscription(self._spec.name, target=self._spec.target, settings=self._spec.settings) as subscription:
            await subscription.refresh(copy_data=subscription.definition.options.copy_data)
        return [*new, *waiting]

    async def _find(self, found: Observation) -> Sequence[TableName]:
        async with await self._spec.publisher() as session:
            lines, self.unfit = await extend_publication(session, self._spec.publication, self._spec.choice)
            for line in [*lines, *(error.one_line() for error in self.unfit)]:
                self._tell(line)
            published = await published_names(session, [self._spec.publication], self._spec.options.mapping)
        return sorted(published.keys() - {each.table for each in found.tables})
