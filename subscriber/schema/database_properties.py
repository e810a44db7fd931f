"""What belongs to a database itself: settings, owner, privileges, comment, connection limit, encoding and locale.

pg_dump has these only with --create, which writes the database's name and creates it. So they are read and written here. A property that
the target's database has already is left as it is, as all objects are.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from subscriber.interfaces import Query, TableName
from subscriber.interfaces.table_schema import SchemaDifference
from subscriber.protocol.quoting import quote_identifier, quote_literal

__all__ = ["DatabaseChange", "DatabaseProperties", "database_changes", "read_database"]

_FENCED: Final = "default_transaction_read_only"
"""A cutover sets and resets it."""
_LIBRARIES: Final = frozenset({"local_preload_libraries", "session_preload_libraries"})
"""A library that is missing ends every session at its start, also those that could reset the setting. It has to be installed first."""
_LISTS: Final = frozenset(
    {
        "local_preload_libraries",
        "search_path",
        "session_preload_libraries",
        "shared_preload_libraries",
        "temp_tablespaces",
        "unix_socket_directories",
    }
)
"""Settings whose elements are stored as quoted names: GUC_LIST_QUOTE, as in src/bin/pg_dump/dumputils.c."""
_ELEMENT: Final = re.compile(r'\s*(?:"((?:[^"]|"")*)"|([^,"]*?))\s*(?:,|\Z)')
_READ: Final = f"""
WITH here AS (SELECT d.*, pg_catalog.to_jsonb(d) AS j FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
SELECT 'fact', f.name, f.value, NULL::text
  FROM here, LATERAL (VALUES
    ('encoding', pg_catalog.pg_encoding_to_char(here.encoding)::text), ('LC_COLLATE', here.datcollate::text),
    ('LC_CTYPE', here.datctype::text), ('ICU rules', here.j ->> 'daticurules'), ('collation version', here.j ->> 'datcollversion'),
    ('locale', COALESCE(here.j ->> 'datlocale', here.j ->> 'daticulocale')),
    ('locale provider', CASE here.j ->> 'datlocprovider' WHEN 'i' THEN 'icu' WHEN 'b' THEN 'builtin' ELSE 'libc' END)) AS f (name, value)
UNION ALL
SELECT 'own', f.name, f.value, NULL
  FROM here, LATERAL (VALUES
    ('name', here.datname::text), ('comment', pg_catalog.shobj_description(here.oid, 'pg_database')), ('limit', here.datconnlimit::text),
    ('owner', pg_catalog.pg_get_userbyid(here.datdba)::text), ('user', current_user::text),
    ('granted', (here.datacl IS NOT NULL)::text), ('closed', (pg_catalog.to_regclass('subscriber.fence') IS NOT NULL)::text))
    AS f (name, value)
UNION ALL
SELECT 'label', l.provider, l.label, NULL FROM here JOIN pg_catalog.pg_shseclabel AS l ON l.objoid = here.oid
   AND l.classoid = 'pg_catalog.pg_database'::pg_catalog.regclass
UNION ALL
SELECT CASE WHEN s.setdatabase = 0 THEN 'everywhere' ELSE 'setting' END, COALESCE(r.rolname::text, ''),
       pg_catalog.split_part(c, '=', 1), pg_catalog.substr(c, pg_catalog.strpos(c, '=') + 1)
  FROM here JOIN pg_catalog.pg_db_role_setting AS s ON s.setdatabase = here.oid OR (s.setdatabase = 0 AND s.setrole <> 0)
  LEFT JOIN pg_catalog.pg_roles AS r ON r.oid = s.setrole CROSS JOIN LATERAL pg_catalog.unnest(s.setconfig) AS c
 WHERE c NOT LIKE '{_FENCED}=%'
UNION ALL
SELECT 'grant', COALESCE(r.rolname::text, ''), a.privilege_type, a.is_grantable::text
  FROM here CROSS JOIN LATERAL pg_catalog.aclexplode(COALESCE(here.datacl, pg_catalog.acldefault('d', here.datdba))) AS a
  LEFT JOIN pg_catalog.pg_roles AS r ON r.oid = a.grantee
 WHERE a.grantee <> here.datdba
UNION ALL
SELECT 'role', rolname::text, NULL, NULL FROM pg_catalog.pg_roles
"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseProperties:
    """The properties of one database.

    Attributes:
        name: its name.
        facts: what cannot be changed: encoding, locale, version of the collation.
        comment: its comment, or None.
        limit: how many connections it takes; -1: no limit.
        owner: its owner.
        user: the role that reads this.
        settings: values by role and name; the role is empty for settings of the database.
        everywhere: settings that roles have in all databases.
        labels: security labels by provider.
        granted: whether its privileges are not the default.
        grants: whether a privilege can be granted, by grantee and privilege, without those of the owner. PUBLIC is empty.
        closed: whether a cutover has closed it, so that its privileges may be others.
        roles: the roles of the server.
    """

    name: str
    comment: str | None
    limit: int
    owner: str = ""
    user: str = ""
    granted: bool
    closed: bool
    facts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[tuple[str, str], str] = field(default_factory=dict)
    everywhere: Mapping[tuple[str, str], str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    grants: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    roles: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class DatabaseChange:
    """A difference, and whether ``schema copy`` removes it.

    Attributes:
        difference: for people, with DDL.
        moves: the target has nothing of its own there.
        privilege: it is moved only with owners and privileges.
    """

    difference: SchemaDifference
    moves: bool = False
    privilege: bool = False


async def read_database(query: Query) -> DatabaseProperties:
    """Read the properties of the database of a session.

    Raises:
        PublisherError, TargetError: the query failed.
    """
    found = defaultdict[str, dict[tuple[str, str], str | None]](dict)
    own = dict[str, str | None]()
    for kind, name, key, value in await query(_READ):
        if kind in {"fact", "own", "label"}:
            (own if kind == "own" else found[kind])[name if kind == "own" else (name or "", "")] = key  # type: ignore[index]
        else:
            found[kind or ""][name or "", key or ""] = value
    settings, everywhere = ({key: value or "" for key, value in found[kind].items()} for kind in ("setting", "everywhere"))
    return DatabaseProperties(
        name=own["name"] or "",
        comment=own["comment"],
        limit=int(own["limit"] or -1),
        owner=own["owner"] or "",
        user=own["user"] or "",
        granted=own["granted"] == "true",
        closed=own["closed"] == "true",
        facts={name: value for (name, _), value in found["fact"].items() if value is not None},
        settings=settings,
        everywhere=everywhere,
        labels={name: value or "" for (name, _), value in found["label"].items()},
        grants={key: value == "true" for key, value in found["grant"].items()},
        roles=frozenset(name for name, _ in found["role"]),
    )


def database_changes(
    publisher: DatabaseProperties, target: DatabaseProperties, renamed: Mapping[str, str] | None = None
) -> list[DatabaseChange]:
    """What differs.

    Args:
        publisher: its database.
        target: its database.
        renamed: the target's role for a role of the publisher.
    """
    found = _Comparison(publisher, target, renamed or {})
    return [*found.facts(), *found.settings(), *found.everywhere(), *found.privileges(), *found.others(), *found.owner()]


class _Comparison:
    def __init__(self, publisher: DatabaseProperties, target: DatabaseProperties, renamed: Mapping[str, str]) -> None:
        self._publisher = publisher
        self._target = target
        self._renamed = renamed
        self._name = TableName("", target.name)
        self._alter = f"ALTER DATABASE {quote_identifier(target.name)}"

    def _difference(self, message: str, *ddl: str, extra: bool = False, kind: str = "database") -> SchemaDifference:
        return SchemaDifference(kind=kind, name=self._name, message=message, ddl=ddl, extra=extra)

    def _missing(self, role: str, what: str) -> DatabaseChange:
        return DatabaseChange(self._difference(f'role "{role}" does not exist in the target: its {what} are not moved'))

    def _role(self, role: str) -> str | None:
        """The target's role; None: it has none."""
        wanted = self._renamed.get(role, role)
        return wanted if not role or wanted in self._target.roles else None

    def facts(self) -> Iterator[DatabaseChange]:
        for name, value in self._publisher.facts.items():
            other = self._target.facts.get(name)
            if other is not None and other != value:
                message = f'the {name} of the target\'s database is "{other}", and "{value}" on the publisher: it cannot be changed'
                yield DatabaseChange(self._difference(message, kind="encoding" if name == "encoding" else "database"))

    def settings(self) -> Iterator[DatabaseChange]:
        expected, missing = dict[tuple[str, str], str](), dict[str, None]()
        for (role, name), value in self._publisher.settings.items():
            there = self._role(role)
            if there is None:
                missing[role] = None
            else:
                expected[there, name] = value
        for role in missing:
            yield self._missing(role, "settings in the database")
        for (role, name), value in expected.items():
            other = self._target.settings.get((role, name))
            if other is None or _normal(name, other) != _normal(name, value):
                here, elsewhere = _shown(name, value), "not set" if other is None else _shown(name, other)
                message = f"{name}{_of(role)} is {elsewhere} for the target's database, and {here} for the publisher's"
                sql = f"{self._of(role)} SET {quote_identifier(name)} TO {_sql(name, value)};"
                if name in _LIBRARIES:
                    message += "; it is not moved, because no session can begin if the library is missing: install it, then set it yourself"
                yield DatabaseChange(self._difference(message, sql), moves=other is None and name not in _LIBRARIES)
        for role, name in self._target.settings.keys() - expected.keys():
            message = f"{name}{_of(role)} is set only for the target's database"
            yield DatabaseChange(self._difference(message, f"{self._of(role)} RESET {quote_identifier(name)};", extra=True))

    def _of(self, role: str) -> str:
        return f"ALTER ROLE {quote_identifier(role)} IN DATABASE {quote_identifier(self._target.name)}" if role else self._alter

    def everywhere(self) -> Iterator[DatabaseChange]:
        for (role, name), value in self._publisher.everywhere.items():
            there = self._role(role)
            if there is None:
                continue
            other = self._target.everywhere.get((there, name))
            if other is None or _normal(name, other) != _normal(name, value):
                elsewhere = "not set" if other is None else _shown(name, other)
                message = (
                    f'{name} of role "{there}" in all databases is {elsewhere} in the target, and {_shown(name, value)} on the publisher'
                )
                sql = f"ALTER ROLE {quote_identifier(there)} SET {quote_identifier(name)} TO {_sql(name, value)};"
                yield DatabaseChange(self._difference(message, sql))

    def privileges(self) -> Iterator[DatabaseChange]:
        if self._publisher.closed or self._target.closed:
            return
        expected, missing = dict[tuple[str, str], bool](), dict[str, None]()
        for (role, privilege), grantable in self._publisher.grants.items():
            there = self._role(role)
            if there is None:
                missing[role] = None
            else:
                expected[there, privilege] = grantable
        for role in missing:
            yield self._missing(role, "privileges on the database")
        on = f"ON DATABASE {quote_identifier(self._target.name)}"
        for (role, privilege), grantable in expected.items():
            if self._target.grants.get((role, privilege)) in {True, grantable}:
                continue
            option = " WITH GRANT OPTION" if grantable else ""
            message = f"{_grantee(role)} lacks the privilege {privilege}{option} on the target's database"
            ddl = f"GRANT {privilege} {on} TO {_quoted(role)}{option};"
            yield DatabaseChange(self._difference(message, ddl), moves=True, privilege=True)
        for role, privilege in self._target.grants.keys() - expected.keys():
            message = f"{_grantee(role)} has the privilege {privilege} only on the target's database"
            difference = self._difference(message, f"REVOKE {privilege} {on} FROM {_quoted(role)};", extra=bool(role))
            yield DatabaseChange(difference, moves=not self._target.granted, privilege=True)

    def others(self) -> Iterator[DatabaseChange]:
        here, there = self._publisher, self._target
        if here.comment is not None and here.comment != there.comment:
            ddl = f"COMMENT ON DATABASE {quote_identifier(there.name)} IS {quote_literal(here.comment)};"
            yield DatabaseChange(self._difference("the comment on the database differs", ddl), moves=there.comment is None)
        if here.limit != there.limit:
            message = f"the target's database takes {_limit(there.limit)} connections, and the publisher's {_limit(here.limit)}"
            change = self._difference(message, f"{self._alter} CONNECTION LIMIT {here.limit};")
            # a limit of 0 would keep out what migrates
            yield DatabaseChange(change, moves=there.limit < 0 < here.limit)
        for provider in here.labels.keys() - there.labels.keys():
            yield DatabaseChange(self._difference(f'the security label of provider "{provider}" on the database is not moved'))

    def owner(self) -> Iterator[DatabaseChange]:
        """It is moved if the target's database still belongs to the role that migrates."""
        here, there = self._publisher, self._target
        role = self._role(here.owner)
        if role is None:
            yield DatabaseChange(self._difference(f'role "{here.owner}" does not exist in the target: it does not own the database there'))
        elif role != there.owner:
            message = f'the target\'s database belongs to role "{there.owner}", and the publisher\'s to "{here.owner}"'
            change = self._difference(message, f"{self._alter} OWNER TO {quote_identifier(role)};")
            yield DatabaseChange(change, moves=there.owner == there.user, privilege=True)


def _limit(limit: int) -> str:
    return "any number of" if limit < 0 else f"at most {limit:,}"


def _of(role: str) -> str:
    return f' of role "{role}"' if role else ""


def _grantee(role: str) -> str:
    return f'role "{role}"' if role else "PUBLIC"


def _quoted(role: str) -> str:
    return quote_identifier(role) if role else "PUBLIC"


def _shown(name: str, value: str) -> str:
    """The value, unless the setting is one of applications or extensions, which may be a secret."""
    return "another value" if "." in name else f'"{value}"'


def _elements(value: str) -> list[str]:
    found = [quoted.replace('""', '"') or bare for quoted, bare in _ELEMENT.findall(value)]
    # the expression also matches the empty text at the end
    return found[:-1] or found


def _normal(name: str, value: str) -> object:
    return _elements(value) if name in _LISTS else value


def _sql(name: str, value: str) -> str:
    return ", ".join(map(quote_literal, _elements(value))) if name in _LISTS else quote_literal(value)
