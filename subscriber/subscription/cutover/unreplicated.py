"""What no publication can have, in a cutover: rows of unlogged tables, and large objects."""

from __future__ import annotations

from collections.abc import Callable

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.printable import shortened
from subscriber.subscription.cutover.options import CutoverOptions

__all__ = ["move_unreplicated", "unreplicated_problems"]


async def unreplicated_problems(source: str, destination: str | None, options: CutoverOptions) -> tuple[list[SubscriberError], list[str]]:
    """Errors, and notes for people.

    Args:
        source: connection string of the database that writers leave.
        destination: of the other one; None: it is not PostgreSQL.
        options: of the cutover.

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
            message = f"the new database has no unlogged tables {shortened(missing)}"
            errors.append(ConfigurationError(message, hint="create them there (subscriber schema copy), or omit --unlogged"))
        notes.append(f"rows of unlogged tables are moved while writers are stopped, {found.size:,} bytes: {shortened(names)}")
    elif names:
        notes.append(f"unlogged tables are not replicated, and their rows not moved (--unlogged moves them): {shortened(names)}")
    if found.large_objects and options.large_objects:
        notes.append(f"{found.large_objects:,} large objects are moved while writers are stopped, and replace those of the new database")
        if found.unreadable:
            message = f"the role may not read {found.unreadable:,} of {found.large_objects:,} large objects"
            errors.append(ConfigurationError(message, hint="connect as a member of their owners' roles, or omit --large-objects"))
    elif found.large_objects:
        number = f"{found.large_objects:,} large objects"
        notes.append(f"large objects are not replicated, and not moved (--large-objects moves them): {number}")
    return errors, notes


async def move_unreplicated(source: str, destination: str, options: CutoverOptions, tell: Callable[[str], None]) -> None:
    """Move what the options say, while nobody writes. May be repeated.

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
