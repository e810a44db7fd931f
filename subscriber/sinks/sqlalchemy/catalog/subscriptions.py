"""The catalog of subscriptions in a target of this sink, for verbs, launcher and ``status``."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from subscriber.catalog import Observation
from subscriber.catalog.observe import observe as observe_store
from subscriber.catalog.subscriptions import StoredCatalog
from subscriber.sinks.sqlalchemy.catalog.creation import ensure_catalog, has_catalog
from subscriber.sinks.sqlalchemy.catalog.store import SqlAlchemyStore
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.locks import Locks

__all__ = ["SqlAlchemyCatalog", "observe"]

_log = logging.getLogger(__name__)


class SqlAlchemyCatalog(StoredCatalog[SqlAlchemyStore]):
    """See :class:`subscriber.catalog.Catalog`. Created by :meth:`open`."""

    @classmethod
    async def open(cls, target: str) -> SqlAlchemyCatalog:
        """Connect. Create the catalog if it does not exist.

        Raises:
            ConfigurationError: the target is not a URL of SQLAlchemy, or its driver is not installed.
            TargetUnavailable, TargetError
        """
        database = Database(target)
        found = cls(SqlAlchemyStore(database, Locks(database)))
        try:
            await ensure_catalog(database)
        except BaseException:
            await found.close()
            raise
        return found

    async def remove(self, oid: int) -> Sequence[str]:
        """Remove a subscription with all its rows, including its prepared transactions. A warning names these: they were not applied.

        Raises:
            TargetUnavailable, TargetError
        """
        waiting = await self.prepared_transactions(oid)
        await super().remove(oid)
        if waiting:
            _log.warning(
                "prepared transactions were waiting for their COMMIT PREPARED and were removed with the subscription: %s"
                " (hint: if they are committed on the publisher, copy their changes by hand)",
                ", ".join(waiting),
            )
        return ()


async def observe(target: str) -> Sequence[Observation]:
    """Observe all subscriptions of a target, sorted by name. The result is empty if there is no catalog.

    Raises:
        ConfigurationError: the target is not a URL of SQLAlchemy, or its driver is not installed.
        TargetUnavailable: the target cannot be reached.
        TargetError: the file does not exist, a privilege is missing, or the catalog has another version.
    """
    database = Database(target, create=False)
    store = SqlAlchemyStore(database, Locks(database))
    try:
        async with database.reading() as connection:
            if not await has_catalog(connection):
                return []
        return await observe_store(store)
    finally:
        await store.close()
