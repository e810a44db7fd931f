"""What is not replicated, in a cutover: tables that the way back does not have, rows of unlogged tables, and large objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.printable import shortened
from subscriber.protocol.quoting import quote_literal
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.walreceiver.new_publication import pattern_condition
from subscriber.walreceiver.session import Session

__all__ = ["move_unreplicated", "require_replicated", "unreplicated_problems"]

_UNPUBLISHED: Final = """
WITH published AS (
    SELECT tree.relid FROM pg_catalog.pg_publication_tables AS t
      JOIN pg_catalog.pg_namespace AS n ON n.nspname = t.schemaname
      JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
     CROSS JOIN LATERAL (SELECT c.oid AS relid UNION SELECT p.relid FROM pg_catalog.pg_partition_tree(c.oid) AS p) AS tree
     WHERE t.pubname = {publication})
SELECT n.nspname || '.' || c.relname
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND c.oid NOT IN (SELECT relid FROM published)
   AND NOT (n.nspname LIKE 'pg\\_%' OR n.nspname IN ('information_schema', 'subscriber')) AND NOT ({excluded})
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS d
        WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e')
 ORDER BY 1
"""


async def require_replicated(conninfo: str, name: str, options: CutoverOptions) -> None:
    """Look for tables of the new database that the way back does not have: a rollback would lose their rows.

    Args:
        conninfo: of the new database.
        name: of the way back.
        options: of the rollback.

    Raises:
        ConfigurationError: there are some, and the options do not leave them out.
        SubscriberError: the database cannot be queried.
    """
    excluded = " OR ".join(map(pattern_condition, options.exclude_tables)) or "false"
    async with await Session.connect(conninfo, application_name="subscriber cutover") as session:
        rows = await session.execute(_UNPUBLISHED.format(publication=quote_literal(name), excluded=excluded))
    if rows:
        names = shortened([table or "" for (table,) in rows])
        raise ConfigurationError(
            f"the way back does not have these tables of the new database, and their rows would be lost: {names}",
            hint=f"create them in the old database, add them to publication {name}, and use `subscriber alter {name} --refresh`; or leave"
            " them in the new database with --exclude-table",
        )


async def unreplicated_problems(
    source: str, destination: str | None, options: CutoverOptions, place: str
) -> tuple[list[SubscriberError], list[str]]:
    """Errors, and notes for people.

    Args:
        source: connection string of the database that writers leave.
        destination: of the other one; None: it is not PostgreSQL.
        options: of the cutover.
        place: what the other one is.

    Raises:
        SubscriberError: one of the two databases cannot be queried.
    """
    if (options.unlogged or options.large_objects) and destination is None:
        hint = "omit --unlogged and --large-objects"
        return [ConfigurationError("unlogged tables and large objects can be moved only to PostgreSQL", hint=hint)], []
    from subscriber.sinks.postgres.unreplicated_objects import find_unreplicated  # noqa: PLC0415 -- its drivers come with an extra

    found = await find_unreplicated(source)
    errors, notes = list[SubscriberError](), list[str]()
    names = [f'"{table}"' for table in found.tables]
    if names and options.unlogged and destination is not None:
        there = (await find_unreplicated(destination)).tables
        if missing := [f'"{table}"' for table in found.tables if table not in there]:
            message = f"{place} has no unlogged tables {shortened(missing)}"
            errors.append(ConfigurationError(message, hint="create them there (subscriber schema copy), or use --no-unlogged"))
        notes.append(f"rows of unlogged tables are moved while writers are stopped, {found.size:,} bytes: {shortened(names)}")
    elif names:
        notes.append(f"unlogged tables are not replicated, and their rows not moved (--unlogged moves them): {shortened(names)}")
    if found.large_objects and options.large_objects:
        notes.append(f"{found.large_objects:,} large objects are moved while writers are stopped, and replace those of {place}")
        if found.unreadable:
            message = f"the role may not read {found.unreadable:,} of {found.large_objects:,} large objects"
            errors.append(ConfigurationError(message, hint="connect as a member of their owners' roles, or use --no-large-objects"))
    elif found.large_objects:
        number = f"{found.large_objects:,} large objects"
        notes.append(f"large objects are not replicated, and not moved (--large-objects moves them): {number}")
    return errors, notes


async def move_unreplicated(source: str, destination: str, options: CutoverOptions, tell: Callable[[str], None]) -> None:
    """Move what the options name. Writers are stopped. May be repeated.

    Raises:
        SubscriberError: something cannot be moved.
    """
    from subscriber.sinks.postgres.unreplicated_objects import move_large_objects, move_unlogged_rows  # noqa: PLC0415 -- as above

    try:
        if options.unlogged:
            tell(f"the rows of {await move_unlogged_rows(source, destination):,} unlogged tables are moved")
        if options.large_objects:
            tell(f"{await move_large_objects(source, destination):,} large objects are moved")
    except SubscriberError as error:
        error.add_note("while moving unlogged tables and large objects")
        raise
