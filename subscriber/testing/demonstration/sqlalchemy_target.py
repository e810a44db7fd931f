"""Targets of the demonstration through SQLAlchemy: SQLite, MariaDB and others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from subscriber.config import Settings
from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.catalog.inspection import TargetInspection
from subscriber.testing.comparison import PreparedComparison, compare, prepared_transactions
from subscriber.testing.demonstration.target import DatabaseFacts, Example
from subscriber.testing.load.tables import SPECIMEN_NAMES, table_names
from subscriber.verification.model import TableReport

__all__ = ["SqlAlchemyTarget"]

_LESS: Final = frozenset({"mysql", "mariadb"})
_FILES: Final = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files of a SQLite database. The directory of this program's locks is beside them."""


class SqlAlchemyTarget:
    """See :class:`subscriber.testing.demonstration.target.DemoTarget`. A new SQLite file is removed in the end.

    Args:
        url: for SQLAlchemy.

    Raises:
        ConfigurationError: the URL is not valid, or its driver is not installed.
    """

    settings: Final = Settings(create_tables=True)
    makes_tables: Final = True
    examples: Final[Sequence[Example]] = ()
    proof: Final = "every row of both, value by value, each as PostgreSQL writes it"

    def __init__(self, url: str) -> None:
        self.url: Final = url
        self._target = TargetInspection(url)
        path = self._target.database.path
        self._new_file = path if path is not None and not path.exists() else None
        self._had_catalog = False

    async def inspect(self) -> DatabaseFacts:
        description = await self._target.describe()
        self._had_catalog = await self._target.has_catalog()
        return DatabaseFacts(description, two_phase=True, had_catalog=self._had_catalog)

    async def make_tables(self, schema: str) -> None:
        """Check that tables of these names do not exist: the subscription creates them.

        Some targets have dates and floats with a smaller range than PostgreSQL's (no infinity, no NaN, no years BC). For these, the table
        that has such values is created beforehand, with text columns, as users with such values must do.
        """
        found = await self._target.existing(table_names(schema))
        if found:
            raise ConfigurationError(
                f'table "{found[0]}" exists already in the target', hint="it may be in use: drop or rename it, or take another database"
            )
        if self._target.database.dialect_name in _LESS:
            await self._target.make_text_table(TableName(schema, "specimens"), "id", SPECIMEN_NAMES.split(", "))

    async def reached(self, lsn: Lsn) -> None:
        """Do nothing: durable changes are visible."""

    def visible(self, flushed: Lsn) -> Lsn:
        """Everything durable is visible."""
        return flushed

    async def compare(self, publisher_dsn: str, tables: Sequence[TableName]) -> list[TableReport]:
        """Compare tables value by value."""
        return await compare(publisher_dsn, self.url, tables)

    async def compare_prepared(self, publisher_dsn: str) -> PreparedComparison | None:
        """Compare the transactions prepared on the publisher with those stored in the target."""
        return PreparedComparison(await prepared_transactions(publisher_dsn), await self._target.prepared_transactions())

    async def forget(self, name: str) -> None:
        """Remove the subscription's rows, and the catalog if it did not exist before."""
        await self._target.forget(name, had_catalog=self._had_catalog)

    async def remove_tables(self, schema: str) -> None:
        await self._target.drop_tables(table_names(schema))

    async def close(self) -> None:
        """Disconnect, and remove a file that was created for the demonstration."""
        await self._target.close()
        if self._new_file is not None:
            await asyncio.to_thread(_remove_database, self._new_file)


def _remove_database(path: Path) -> None:
    for suffix in _FILES:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.rmtree(f"{path}-locks", ignore_errors=True)
