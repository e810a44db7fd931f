"""Whether the schema ``subscriber`` of a PostgreSQL database can be trusted, before this program uses it.

Who owns a table decides what runs when it is used: triggers, policies, and the query of a view run with the rights of its user. A
role that may create schemas could make ``subscriber`` before this program does, and wait for a session with more rights.

Trusted are this session's role, the roles that it is a member of, and the database's owner with its members, which all superusers are. A
superuser is a member of all roles, so for it only the others count.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DISTRUSTED", "READABLE", "TABLES", "trust_hint"]

TABLES: Final = (
    "version",
    "pg_subscription",
    "pg_subscription_rel",
    "position",
    "prepared_transaction",
    "copy_part",
    "worker",
    "subscription_stats",
    "snapshot_request",
    "verification",
    "migration",
    "fence",
)
"""The tables that this program makes there. What others add to the schema is not used, and not looked at."""
_OURS: Final = ", ".join(f"'{name}'" for name in TABLES)

DISTRUSTED: Final = f"""
SELECT o.what, pg_catalog.pg_get_userbyid(o.owner) AS owner
FROM (
    SELECT 'schema "subscriber"' AS what, n.nspowner AS owner, 0 AS number FROM pg_catalog.pg_namespace n WHERE n.nspname = 'subscriber'
    UNION ALL
    SELECT 'relation "subscriber.' || c.relname || '"', c.relowner, 1
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'subscriber' AND c.relname IN ({_OURS})
) o, pg_catalog.pg_roles me, pg_catalog.pg_database d
WHERE me.rolname = current_user AND d.datname = pg_catalog.current_database() AND o.owner <> me.oid
  AND NOT pg_catalog.pg_has_role(o.owner, d.datdba, 'MEMBER') AND (me.rolsuper OR NOT pg_catalog.pg_has_role(o.owner, 'MEMBER'))
ORDER BY o.number, o.what
"""  # noqa: S608
"""What belongs to roles that are not trusted, each with its role. No row: all is trusted."""

READABLE: Final = f"""
SELECT 'relation "subscriber.' || c.relname || '"' AS what
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'subscriber' AND c.relname IN ({_OURS}) AND (c.relkind <> 'r' OR c.relrowsecurity)
LIMIT 1
"""  # noqa: S608
"""A relation that even reading is not safe from: a view or a table with policies in place of a table. No row: there is none."""


def trust_hint(owner: str) -> str:
    """What to do about something that a role owns which is not trusted."""
    return (
        f"if subscriptions run as role \"{owner}\", connect as that role, or act for it with options='-c role=…' in the connection string;"
        " else find out who made it, and drop it"
    )
