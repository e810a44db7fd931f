"""Differences between the schemas of publisher and target."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.catalog.target_kind import SchemaKind
from subscriber.config.mapping import NO_MAPPING, TableMapping
from subscriber.errors import PublisherError
from subscriber.interfaces import Finding
from subscriber.interfaces.schema import SchemaProgress, Section
from subscriber.interfaces.table_schema import SchemaDifference
from subscriber.schema.database_properties import database_changes, read_database
from subscriber.schema.differences import differences
from subscriber.schema.inspection import SchemaScope, inspect
from subscriber.schema.mapped_schema import mapped_schema, with_names_of_sequences
from subscriber.subscription.targets import is_postgres, required_ability
from subscriber.walreceiver.mapped_tables import mapped_names
from subscriber.walreceiver.publication import missing_publications, publications_missing, published_names, published_tables
from subscriber.walreceiver.session import Session

__all__ = ["NO_SCHEMA", "copy_to_other", "database_differences", "difference_findings", "find_differences"]

NO_SCHEMA = ("has no keys, indexes and constraints", "omit this step; `subscriber check` finds tables that do not fit")
_SHOWN = 3


async def find_differences(
    session: Session,
    target: str,
    publications: Sequence[str],
    *,
    schemas: Sequence[str] = (),
    everything: bool = False,
    mapping: TableMapping = NO_MAPPING,
) -> list[SchemaDifference]:
    """See :func:`subscriber.diff_schema`.

    Raises:
        PublisherError: the publisher cannot be read, or a publication does not exist.
        TargetError: the target cannot be read.
    """
    if missing := await missing_publications(session, publications):
        raise PublisherError(publications_missing(missing), hint="CREATE PUBLICATION there, or correct the name")
    names = mapped_names(await published_names(session, publications), mapping)
    publisher = mapped_schema(
        await inspect(session.execute, SchemaScope(tables=names.values(), schemas=schemas, everything=everything)), mapping
    )
    if not is_postgres(target):
        kind = required_ability(target, SchemaKind, *NO_SCHEMA)
        return await kind.compare_schema(target, await published_tables(session, publications, mapping=mapping), publisher)
    from subscriber.schema.postgres import inspect_target  # noqa: PLC0415 -- its drivers come with an extra

    scope = SchemaScope(tables=publisher.tables.keys() | names.keys(), schemas=schemas, everything=everything)
    there = await inspect_target(target, scope)
    if mapping:
        publisher = with_names_of_sequences(publisher, there)
    return [*differences(publisher, there), *await database_differences(session, target)]


async def database_differences(session: Session, target: str) -> list[SchemaDifference]:
    """What differs between the databases themselves, for a PostgreSQL target: settings, privileges, locale.

    Raises:
        PublisherError: the publisher cannot be read.
        TargetError: the target cannot be read.
    """
    from subscriber.schema.postgres import query_target  # noqa: PLC0415 -- its drivers come with an extra

    async with query_target(target) as query:
        changes = database_changes(await read_database(session.execute), await read_database(query))
    return [change.difference for change in changes]


async def copy_to_other(
    session: Session,
    target: str,
    publications: Sequence[str],
    sections: Sequence[Section],
    progress: SchemaProgress,
    *,
    mapping: TableMapping = NO_MAPPING,
) -> list[str]:
    """Create the published tables, and their keys and indexes, in a target that is not PostgreSQL. See :func:`subscriber.copy_schema`.

    Raises:
        PublisherError: the publisher cannot be read, or a publication does not exist.
        TargetError: an object cannot be created.
    """
    if missing := await missing_publications(session, publications):
        raise PublisherError(publications_missing(missing), hint="CREATE PUBLICATION there, or correct the name")
    tables = await published_tables(session, publications, mapping=mapping)
    schema = mapped_schema(await inspect(session.execute, SchemaScope(tables=[table.publisher_name for table in tables])), mapping)
    kind = required_ability(target, SchemaKind, *NO_SCHEMA)
    return await kind.copy_schema(target, tables, schema, sections, progress)


def difference_findings(found: Sequence[SchemaDifference]) -> list[Finding]:
    """The differences as warnings of ``check``. Tables, columns and encodings are left out: other checks report them."""
    telling = [
        each for each in found if not each.extra and each.kind not in {"table", "column", "owner", "comment", "encoding", "identity"}
    ]
    hint = "subscriber schema diff shows all differences, and with --ddl the statements that remove them"
    findings = []
    for what, kind in (("schema", False), ("database", True)):
        messages = [each.message for each in telling if (each.kind == "database") is kind]
        if messages:
            more = f"; and {len(messages) - _SHOWN:,} more" if len(messages) > _SHOWN else ""
            message = f"the {what} of the target differs from the publisher's: {'; '.join(messages[:_SHOWN])}{more}"
            findings.append(Finding("warning", message, hint))
    return findings
