"""Creates the publication of a migration."""

from __future__ import annotations

from typing import Final

from subscriber.abc import CATALOG_SCHEMA
from subscriber.errors import ConfigurationError
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.walreceiver.publication import missing_publications
from subscriber.walreceiver.session import Session

__all__ = ["ensure_publication"]

_SHOWN: Final = 3
_OF_EXTENSION: Final = """EXISTS (
        SELECT FROM pg_catalog.pg_depend AS d
         WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e')"""
_TABLES: Final = f"""
SELECT n.nspname, c.relname, {_OF_EXTENSION} FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
   AND n.nspname NOT IN ('pg_catalog', 'information_schema', {quote_literal(CATALOG_SCHEMA)}) AND n.nspname !~ '^pg_'
 ORDER BY 1, 2
"""  # noqa: S608
# without a replica identity, the publisher itself would reject each UPDATE and DELETE once the table is published; a deferrable key is none
_KEYLESS: Final = f"""
SELECT n.nspname || '.' || c.relname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_'
   AND NOT {_OF_EXTENSION} AND (c.relreplident = 'n' OR (c.relreplident IN ('d', 'i') AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_index AS i WHERE i.indrelid = c.oid AND i.indimmediate
           AND CASE c.relreplident WHEN 'd' THEN i.indisprimary ELSE i.indisreplident END)))
 ORDER BY 1
"""  # noqa: S608


async def ensure_publication(session: Session, name: str) -> str:
    """Create a publication of all tables, if there is none of this name.

    Tables of extensions are left out: CREATE EXTENSION makes them in the target, often with rows.

    Returns:
        What was done, for people.

    Raises:
        ConfigurationError: a table has no replica identity.
        PublisherError: the role may not create it.
    """
    if not await missing_publications(session, [name]):
        return f'publication "{name}" exists'
    keyless = [table or "" for (table,) in await session.execute(_KEYLESS)]
    if keyless:
        shown = ", ".join(f'"{table}"' for table in keyless[:_SHOWN])
        more = f" and {len(keyless) - _SHOWN:,} more" if len(keyless) > _SHOWN else ""
        raise ConfigurationError(
            f"without a replica identity, the publisher would reject UPDATE and DELETE of published tables: {shown}{more}",
            hint=f"ALTER TABLE … REPLICA IDENTITY FULL, or create publication {quote_identifier(name)} of other tables yourself",
        )
    tables = await session.execute(_TABLES)
    left_out = next((f"{namespace}.{table}" for namespace, table, of_extension in tables if of_extension == "t"), None)
    if left_out is None:
        await session.execute(f"CREATE PUBLICATION {quote_identifier(name)} FOR ALL TABLES")
        return f'publication "{name}" created'
    listed = ", ".join(f"{quote_identifier(each[0] or '')}.{quote_identifier(each[1] or '')}" for each in tables if each[2] == "f")
    await session.execute(f"CREATE PUBLICATION {quote_identifier(name)}{f' FOR TABLE {listed}' if listed else ''}")
    return f'publication "{name}" created, without the tables of extensions, such as "{left_out}"'
