"""Owners and privileges in the SQL of pg_dump: roles get other names, and those that the target lacks are left out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from subscriber.schema.archive import Entry

__all__ = ["Roles"]

_ROLE: Final = r'(?P<{}>"(?:[^"]|"")+"|PUBLIC|[a-z_][a-z0-9_$]*)'
# the last statement: those before belong to the body of a function
_OWNER: Final = re.compile(rf"^ALTER [^\n]* OWNER TO {_ROLE.format('role')};\Z", re.MULTILINE)
_GRANT: Final = re.compile(
    rf"^(?:ALTER DEFAULT PRIVILEGES FOR ROLE {_ROLE.format('creator')}[^\n]*? )?(?:GRANT|REVOKE) [^\n]* (?:TO|FROM) {_ROLE.format('role')}"
    r"(?: WITH GRANT OPTION)?;$",
    re.MULTILINE,
)
_MAPPING: Final = re.compile(rf"^CREATE USER MAPPING FOR {_ROLE.format('role')} SERVER ", re.MULTILINE)
_SESSION: Final = re.compile(r"^(?:SET SESSION AUTHORIZATION [^\n]*|RESET SESSION AUTHORIZATION);$", re.MULTILINE)
_PUBLIC: Final = "PUBLIC"


class Roles:
    """The roles of the target.

    Args:
        existing: the target's roles.
        renamed: the target's role for a role of the publisher.

    Attributes:
        missing: roles of the publisher that were left out.
    """

    def __init__(self, existing: Collection[str], renamed: Mapping[str, str]) -> None:
        self._existing = existing
        self._renamed = renamed
        self.missing = set[str]()

    def sql(self, entry: Entry) -> str:
        """The SQL of an entry, with roles that the target has."""
        if entry.type in {"ACL", "DEFAULT ACL"}:
            return _GRANT.sub(self._replaced, _SESSION.sub("", entry.sql)).strip()
        if entry.type == "USER MAPPING" and (mapping := _MAPPING.search(entry.sql)) is not None and not self._replaced(mapping):
            return ""
        sql = _MAPPING.sub(self._replaced, entry.sql) if entry.type == "USER MAPPING" else entry.sql
        return _OWNER.sub(self._replaced, sql)

    def _replaced(self, statement: re.Match[str]) -> str:
        text, start = statement[0], statement.start()
        for group in sorted((name for name, value in statement.groupdict().items() if value), key=statement.start, reverse=True):
            role = self._role(statement[group])
            if role is None:
                return ""
            text = text[: statement.start(group) - start] + role + text[statement.end(group) - start :]
        return text

    def _role(self, quoted: str) -> str | None:
        if quoted.upper() == _PUBLIC:
            return quoted
        name = quoted[1:-1].replace('""', '"') if quoted.startswith('"') else quoted
        wanted = self._renamed.get(name, name)
        if wanted not in self._existing:
            self.missing.add(name)
            return None
        return '"' + wanted.replace('"', '""') + '"'
