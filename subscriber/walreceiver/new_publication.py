"""Creates the publication of a migration."""

from __future__ import annotations

from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.protocol.quoting import quote_identifier
from subscriber.walreceiver.publication import missing_publications
from subscriber.walreceiver.session import Session

__all__ = ["ensure_publication"]

_SHOWN: Final = 3
# without a replica identity, the publisher itself would reject each UPDATE and DELETE once the table is published; a deferrable key is none
_KEYLESS: Final = """
SELECT n.nspname || '.' || c.relname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_'
   AND (c.relreplident = 'n' OR (c.relreplident IN ('d', 'i') AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_index AS i WHERE i.indrelid = c.oid AND i.indimmediate
           AND CASE c.relreplident WHEN 'd' THEN i.indisprimary ELSE i.indisreplident END)))
 ORDER BY 1
"""


async def ensure_publication(session: Session, name: str) -> bool:
    """Create a publication of all tables, if there is none of this name.

    Returns:
        Whether it was created.

    Raises:
        ConfigurationError: a table has no replica identity.
        PublisherError: the role may not create it.
    """
    if not await missing_publications(session, [name]):
        return False
    keyless = [table or "" for (table,) in await session.execute(_KEYLESS)]
    if keyless:
        shown = ", ".join(f'"{table}"' for table in keyless[:_SHOWN])
        more = f" and {len(keyless) - _SHOWN:,} more" if len(keyless) > _SHOWN else ""
        raise ConfigurationError(
            f"without a replica identity, the publisher would reject UPDATE and DELETE of published tables: {shown}{more}",
            hint=f"ALTER TABLE … REPLICA IDENTITY FULL, or create publication {quote_identifier(name)} of other tables yourself",
        )
    await session.execute(f"CREATE PUBLICATION {quote_identifier(name)} FOR ALL TABLES")
    return True
