"""``schema copy`` and ``schema diff``: bring the publisher's schema to the target, and compare both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from subscriber.catalog.target_kind import SchemaKind
from subscriber.config import SubscriptionOptions
from subscriber.errors import ConfigurationError
from subscriber.interfaces.schema import SchemaProgress, Section
from subscriber.interfaces.table_schema import SchemaDifference
from subscriber.subscription.management.publisher import find_publisher
from subscriber.subscription.setup.schema_differences import NO_SCHEMA, copy_to_other, find_differences
from subscriber.subscription.targets import is_postgres, required_ability
from subscriber.walreceiver.session import Session

__all__ = ["SchemaOptions", "check_client_programs", "copy_schema", "diff_schema"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaOptions:
    """Options of :func:`copy_schema`. All but ``sections`` are for a PostgreSQL target.

    Attributes:
        sections: ``pre-data``, ``post-data``, or both.
        schemas: copy only these schemas; empty: all.
        exclude_schemas: do not copy these.
        exclude_extensions: do not create these extensions.
        publications: also create the publisher's publications.
        event_triggers: also create its event triggers.
        owners: keep owners and privileges, except those of roles that the target lacks.
        map_roles: the target's role for a role of the publisher. Owners and privileges are kept if it is not empty.
        jobs: how many indexes and constraints are built at the same time.
        bindir: the directory of pg_dump and pg_restore; None: they are looked for.
        only_new_tables: leave out what belongs to tables that exist in the target, so that their locks are not waited for.
        left_out_keys: foreign keys of published tables that refer to other tables are created NOT VALID, or skipped; None: they are created
            as they are.
    """

    sections: Sequence[Section] = tuple(Section)
    schemas: Sequence[str] = ()
    exclude_schemas: Sequence[str] = ()
    exclude_extensions: Sequence[str] = ()
    publications: bool = False
    event_triggers: bool = False
    owners: bool = False
    map_roles: Mapping[str, str] | None = None
    jobs: int = 4
    bindir: str | None = None
    only_new_tables: bool = False
    left_out_keys: Literal["not-valid", "skip"] | None = None


async def copy_schema(
    name: str | None = None,
    *,
    target: str,
    connection: str | None = None,
    publications: Sequence[str] = (),
    names: SubscriptionOptions | None = None,
    options: SchemaOptions | None = None,
    progress: SchemaProgress = lambda step: None,
) -> list[str]:
    """Create the publisher's schema in the target. What exists there is left as it is, so the call can be repeated after an error.

    With other names, only the published tables are created, with what they need.

    Args:
        name: of a subscription of the target, whose publisher is used. None: ``connection`` is given.
        target: URL or conninfo of the target.
        connection: connection string of the publisher.
        publications: for other names, or a target that is not PostgreSQL: their tables are created; with ``name``, instead of those of the
            subscription.
        names: ``map``, ``columns``, ``rename`` and ``exclude_table`` of the subscription; None: those of ``name``.
        options: what to copy, and how.
        progress: told about each object.

    Returns:
        What was left out, one line each: privileges of roles that the target lacks; properties of the database that differ; foreign keys;
        kinds of indexes and constraints that the target lacks.

    Raises:
        ConfigurationError: the publisher is not known; pg_dump is missing, or older than the publisher; this kind of target has no schema.
        PublisherError: the schema cannot be read.
        TargetError: an object cannot be created.
    """
    options = options or SchemaOptions()
    if not is_postgres(target):
        required_ability(target, SchemaKind, *NO_SCHEMA)
    conninfo, published, mapping = await find_publisher(name, target, connection, publications, names)
    if not is_postgres(target):
        if not published:
            raise ConfigurationError("no tables are chosen", hint="give the name of a subscription, or --publication")
        async with await Session.connect(conninfo, application_name="subscriber schema") as session:
            return await copy_to_other(session, target, published, options.sections, progress, mapping=mapping)
    if mapping.renames and not published:
        raise ConfigurationError(
            "no tables are chosen, to which other names belong", hint="give the name of a subscription, or --publication"
        )
    from subscriber.schema.archive import Selection  # noqa: PLC0415 -- its drivers come with an extra
    from subscriber.schema.postgres import SchemaOrder, copy_to_postgres  # noqa: PLC0415 -- as above

    selection = Selection(
        schemas=options.schemas,
        exclude_schemas=options.exclude_schemas,
        exclude_extensions=options.exclude_extensions,
        publications=options.publications,
        event_triggers=options.event_triggers,
        owners=options.owners or bool(options.map_roles),
    )
    order = SchemaOrder(
        selection=selection,
        sections=options.sections,
        renamed_roles=options.map_roles or {},
        jobs=options.jobs,
        bindir=options.bindir,
        publications=published,
        only_new_tables=options.only_new_tables,
        left_out_keys=options.left_out_keys,
        mapping=mapping,
    )
    return await copy_to_postgres(conninfo, target, order, progress)


async def check_client_programs(*, connection: str, target: str, options: SchemaOptions) -> None:
    """Check that :func:`copy_schema` will find programs that fit both servers.

    Raises:
        ConfigurationError: pg_dump is missing, or older than the publisher.
        PublisherError, TargetError: a server cannot be reached.
    """
    if not is_postgres(target):
        return
    from subscriber.schema.postgres import client_programs  # noqa: PLC0415 -- its drivers come with an extra

    await client_programs(connection, target, options.bindir)


async def diff_schema(
    name: str | None = None,
    *,
    target: str,
    connection: str | None = None,
    publications: Sequence[str] = (),
    schemas: Sequence[str] = (),
    everything: bool = False,
    names: SubscriptionOptions | None = None,
) -> list[SchemaDifference]:
    """Compare the schema of tables and sequences on both sides. Changes nothing.

    Columns, indexes and constraints that only the target has are reported as ``extra``; tables are not reported. The properties of the
    databases themselves are compared, too: settings, privileges, locale.

    Args:
        name: of a subscription of the target; its publisher and publications are used. None: ``connection`` is given.
        target: URL or conninfo of the target.
        connection: connection string of the publisher.
        publications: their tables are compared, with the sequences that these own; with ``name``, instead of those of the subscription.
        schemas: all tables and sequences of these schemas, too.
        everything: all tables and sequences of the publisher's database, without those of extensions.
        names: as in :func:`copy_schema`.

    Returns:
        The differences, in an order in which their DDL can be executed.

    Raises:
        ConfigurationError: the publisher is not known, nothing was chosen, or this kind of target has no schema.
        PublisherError: the publisher cannot be read, or a publication does not exist.
        TargetError: the target cannot be read.
    """
    if not is_postgres(target):
        required_ability(target, SchemaKind, *NO_SCHEMA)
    conninfo, published, mapping = await find_publisher(name, target, connection, publications, names)
    if not (published or schemas or everything):
        raise ConfigurationError("no tables are chosen", hint="give the name of a subscription, --publication, --schema or --all")
    async with await Session.connect(conninfo, application_name="subscriber schema") as session:
        return await find_differences(session, target, published, schemas=schemas, everything=everything, mapping=mapping)
