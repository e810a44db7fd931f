"""The databases of a demonstration. A target that is somebody's own is looked at before, and left as it was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from subscriber.errors import ConfigurationError
from subscriber.sinks.postgres import PostgresCatalog
from subscriber.sinks.postgres.errors import translated

__all__ = ["DatabaseFacts", "forget_subscription", "inspect_database"]

_CATALOG_SCHEMA: Final = "subscriber"


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """What there is.

    Attributes:
        description: for people: version and place, no password.
        two_phase: may transactions be prepared there?
        had_catalog: was it a target of some subscription before?
    """

    description: str
    two_phase: bool
    had_catalog: bool


async def inspect_database(dsn: str) -> DatabaseFacts:
    """Look at a database, changing nothing.

    Raises:
        ConfigurationError: ``dsn`` is neither a conninfo nor a URL of PostgreSQL.
        TargetError: it cannot be reached, or refuses.
    """
    try:
        conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise ConfigurationError(
            "the target is not a URL or conninfo of PostgreSQL", hint="for example postgresql://user@host:5432/dbname"
        ) from None
    with translated():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            cursor = await connection.execute(
                "SELECT current_setting('server_version'), current_setting('max_prepared_transactions')::integer > 0,"
                " to_regnamespace(%s) IS NOT NULL",
                [_CATALOG_SCHEMA],
            )
            row = await cursor.fetchone()
            assert row is not None
            version, two_phase, had_catalog = row
            info = connection.info
            place = f'{info.host}:{info.port}, database "{info.dbname}"'
    return DatabaseFacts(f"PostgreSQL {version.split()[0]} on {place}", two_phase, had_catalog)


async def forget_subscription(dsn: str, name: str, *, had_catalog: bool) -> None:
    """Remove what a subscription that has ended left in the target: prepared transactions, its rows of the catalog.

    The catalog itself goes too if it was not there before (``had_catalog``) and nobody else came to use it.
    """
    with translated():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            cursor = await connection.execute("SELECT to_regclass('subscriber.pg_subscription')")
            if await cursor.fetchone() == (None,):
                return
            cursor = await connection.execute("SELECT oid::bigint FROM subscriber.pg_subscription WHERE subname = %s", [name])
            for (oid,) in await cursor.fetchall():
                await _remove(dsn, connection, oid)
            if not had_catalog:
                await _drop_unused_catalog(connection)


async def _remove(dsn: str, connection: psycopg.AsyncConnection[Any], oid: int) -> None:
    catalog = await PostgresCatalog.open(dsn, "subscriber demo")
    try:
        for gid in await catalog.remove(oid):
            await connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
    finally:
        await catalog.close()


async def _drop_unused_catalog(connection: psycopg.AsyncConnection[Any]) -> None:
    async with connection.transaction():
        await connection.execute("LOCK TABLE subscriber.pg_subscription IN ACCESS EXCLUSIVE MODE")
        cursor = await connection.execute("SELECT EXISTS (SELECT FROM subscriber.pg_subscription)")
        if await cursor.fetchone() == (False,):
            await connection.execute("DROP SCHEMA subscriber CASCADE")
