"""The schema of a migration: copied in steps, and again when the publisher has new objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from subscriber.interfaces.schema import SchemaProgress, SchemaStep, Section, StepState
from subscriber.subscription.management.schema import copy_schema
from subscriber.subscription.migration.spec import MigrationSpec, Tell

__all__ = ["MigratedSchema"]

# the objects that can be created in a database, without those of temporary tables, and those of this program: a cutover makes some
_OBJECTS: Final = """
SELECT pg_catalog.md5(pg_catalog.string_agg(o.oid::text, ',' ORDER BY o.oid)) FROM (
    SELECT c.oid, c.relnamespace FROM pg_catalog.pg_class AS c WHERE c.oid >= 16384 AND c.relpersistence <> 't' AND c.relkind <> 't'
    UNION ALL SELECT p.oid, p.pronamespace FROM pg_catalog.pg_proc AS p WHERE p.oid >= 16384
    UNION ALL SELECT t.oid, t.typnamespace FROM pg_catalog.pg_type AS t WHERE t.oid >= 16384 AND t.typrelid = 0 AND t.typelem = 0
    UNION ALL SELECT k.oid, k.connamespace FROM pg_catalog.pg_constraint AS k LEFT JOIN pg_catalog.pg_class AS c ON c.oid = k.conrelid
               WHERE c.relpersistence IS DISTINCT FROM 't'
    UNION ALL SELECT g.oid, c.relnamespace FROM pg_catalog.pg_trigger AS g JOIN pg_catalog.pg_class AS c ON c.oid = g.tgrelid
               WHERE c.relpersistence <> 't' AND NOT g.tgisinternal) AS o (oid, schema)
 WHERE o.schema IS DISTINCT FROM pg_catalog.to_regnamespace('subscriber')::oid
"""


class MigratedSchema:
    """Copies the schema of a migration.

    Args:
        spec: of the migration.
        tell: is given a line for what was left out, each time.
        progress: is told about each object.
    """

    def __init__(self, spec: MigrationSpec, tell: Tell, progress: SchemaProgress) -> None:
        self._spec = spec
        self._tell = tell
        self._progress = progress
        self._existing = 0
        self._copied: str | None = None

    async def begin(self) -> None:
        """Create tables, types and functions."""
        await self._copy(Section.PRE_DATA)
        if self._existing:
            self._tell(f"{self._existing:,} objects existed and were left as they are: `subscriber schema diff` compares them")

    async def add_tables(self, *, only_tables: bool = False) -> None:
        """Create tables that are new. ``only_tables``: and leave out what belongs to tables that exist, whose locks may be waited for."""
        await self._copy(Section.PRE_DATA, only_new_tables=only_tables)

    async def complete(self) -> None:
        """Create indexes and constraints, and everything else that the target does not have."""
        found = await self._objects()
        await self._copy(*Section)
        self._copied = found

    async def is_complete(self) -> bool:
        """Whether the publisher has no objects that :meth:`complete` has not seen."""
        return await self._objects() == self._copied

    async def _objects(self) -> str:
        async with await self._spec.publisher() as session:
            ((found,),) = await session.execute(_OBJECTS)
        return found or ""

    async def _copy(self, *sections: Section, only_new_tables: bool = False) -> None:
        self._existing = 0
        for line in await copy_schema(
            connection=self._spec.connection,
            target=self._spec.target,
            publications=[self._spec.publication],
            names=self._spec.options,
            options=replace(self._spec.schema, sections=sections, only_new_tables=only_new_tables),
            progress=self._count,
        ):
            self._tell(line)

    def _count(self, step: SchemaStep) -> None:
        self._existing += step.state is StepState.EXISTS
        self._progress(step)
