"""What ``migrate`` does not move."""

from __future__ import annotations

from typing import Final

from subscriber.interfaces import Query
from subscriber.schema.inventory import extension_versions, not_moved
from subscriber.subscription.management.schema import SchemaOptions
from subscriber.walreceiver.new_publication import published_oids
from subscriber.walreceiver.session import Session

__all__ = ["describe_unmoved", "unmoved_objects"]

_OWNERS: Final = "owners and privileges (--owners keeps them)"
_GLOBALS: Final = "roles with their passwords and settings (pg_dumpall --globals-only), settings of the server"


async def unmoved_objects(publisher: Query, published: str, publication: str, slot: str, options: SchemaOptions) -> list[str]:
    """What will not be moved, for people.

    Args:
        publisher: runs SQL there.
        published: SQL of the oids of the published tables and their partitions.
        publication: of the migration.
        slot: of the migration.
        options: how the schema is copied.

    Raises:
        PublisherError: the publisher cannot be read.
    """
    created = {"publications"} if options.publications else set[str]()
    created |= {"event triggers"} if options.event_triggers else set()
    owners = [] if options.owners or options.map_roles else [_OWNERS]
    return [*await not_moved(publisher, published, [publication], [slot], created), *owners, _GLOBALS]


async def describe_unmoved(connection: str, target: str, publication: str, slot: str, options: SchemaOptions) -> list[str]:
    """What was not moved to a PostgreSQL target, as lines for people. Arguments: as :func:`unmoved_objects`.

    Raises:
        PublisherError, TargetError: one of the two databases cannot be read.
    """
    from subscriber.schema.postgres import query_target  # noqa: PLC0415 -- its drivers come with an extra

    async with await Session.connect(connection, application_name="subscriber migrate") as session, query_target(target) as query:
        lines = await extension_versions(session.execute, query)
        left = await unmoved_objects(session.execute, published_oids([publication]), publication, slot, options)
        return [f"not moved: {line}" for line in left] + lines
