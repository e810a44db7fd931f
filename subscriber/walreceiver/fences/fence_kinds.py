"""The kinds of fences: what closes a database, and what opens it again. See :mod:`subscriber.walreceiver.fences.fence`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from subscriber.errors import ConfigurationError
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.walreceiver.session import Session

__all__ = ["OWN_DEFAULT", "FenceKind", "closing", "opening"]

_GRANTS: Final = """
SELECT a.grantee, coalesce(r.rolname, ''), a.is_grantable
FROM pg_catalog.pg_database d, pg_catalog.aclexplode(coalesce(d.datacl, pg_catalog.acldefault('d', d.datdba))) a
LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
WHERE d.datname = pg_catalog.current_database() AND a.privilege_type = 'CONNECT'
ORDER BY 2
"""
OWN_DEFAULT: Final = """
SELECT pg_catalog.split_part(c, '=', 2)
FROM pg_catalog.pg_db_role_setting s JOIN pg_catalog.pg_database d ON d.oid = s.setdatabase, unnest(s.setconfig) AS c
WHERE d.datname = pg_catalog.current_database() AND s.setrole = 0 AND c LIKE 'default_transaction_read_only=%'
"""


class FenceKind:
    """Names of the kinds."""

    READ_ONLY: Final = "read-only"
    REVOKE: Final = "revoke"


async def closing(session: Session, kind: str, own: Sequence[str]) -> tuple[list[str], str]:
    """The SQL that keeps writers out, except the roles ``own``, and what has to be known to open the database again, as JSON."""
    ((database,),) = await session.execute("SELECT pg_catalog.current_database()")
    name = quote_identifier(database or "")
    commands = list[str]()
    before: Any = None
    if kind == FenceKind.READ_ONLY:
        before = next((value for (value,) in await session.execute(OWN_DEFAULT)), None)
        commands.append(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    else:
        before = await session.execute(_GRANTS)
        commands += [f"REVOKE CONNECT ON DATABASE {name} FROM {_grantee(role)}" for _, role, _ in before]
        commands += [f"GRANT CONNECT ON DATABASE {name} TO {quote_identifier(role)}" for role in own]
    return commands, json.dumps(before)


async def opening(session: Session, kind: str, before: str, own: Sequence[str]) -> list[str]:
    """The SQL that lets writers in. It is made here: a row gives only the kind, a setting's value, and numbers of roles.

    Raises:
        ConfigurationError: another program has written these values.
    """
    if kind not in {FenceKind.READ_ONLY, FenceKind.REVOKE}:
        raise ConfigurationError(
            "the table subscriber.fence names an unknown kind of fence", hint="open the database yourself, and drop it"
        )
    ((database,),) = await session.execute("SELECT pg_catalog.current_database()")
    name = quote_identifier(database or "")
    known = json.loads(before)
    if kind == FenceKind.READ_ONLY:
        value = (
            "RESET default_transaction_read_only" if known is None else f"SET default_transaction_read_only = {quote_literal(str(known))}"
        )
        return [f"ALTER DATABASE {name} {value}"]
    # a role may have been renamed or dropped meanwhile
    found = await session.execute("SELECT oid, rolname FROM pg_catalog.pg_roles UNION ALL VALUES ('0'::pg_catalog.oid, '')")
    roles = {oid: role or "" for oid, role in found}
    grants = {roles[oid]: option for oid, _, option in known or () if oid in roles}
    return [
        *(f"REVOKE CONNECT ON DATABASE {name} FROM {quote_identifier(role)}" for role in own if grants and role not in grants),
        *(
            f"GRANT CONNECT ON DATABASE {name} TO {_grantee(role)}{' WITH GRANT OPTION' if option == 't' else ''}"
            for role, option in grants.items()
        ),
    ]


def _grantee(role: str | None) -> str:
    return quote_identifier(role) if role else "PUBLIC"
