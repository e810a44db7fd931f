"""What pg_dump says of a schema, as entries: the SQL of each object, with what it depends on.

pg_dump writes one archive, so that both sections have the same objects and dependencies. ``pg_restore --verbose --file=-`` turns it into
SQL in which a comment precedes each entry::

    --
    -- TOC entry 2463 (class 1259 OID 16425)
    -- Dependencies: 223
    -- Name: ord_customer; Type: INDEX; Schema: app; Owner: postgres
    --

The text is divided at these comments. ``pg_restore --list`` says which ones to expect, so that a comment within a function's body is not
taken for one.

Between the entries, pg_restore changes ``default_table_access_method``. Each entry gets the setting that is current at its place.

pg_dump makes most settings of its session itself. It gets the others by ``options``, which a connection pooler refuses. So behind a pooler,
the two that change the text of a schema must have the right default, unless the schema has no text that they change.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.protocol.session_settings import PINNED, as_options
from subscriber.schema.client_programs import ClientPrograms, run_program
from subscriber.walreceiver.session import Session

__all__ = ["Entry", "Selection", "read_archive"]

_LISTED: Final = re.compile(r"^(\d+); (\d+) (\d+) ", re.MULTILINE | re.ASCII)
_HEADER: Final = re.compile(
    r"^--\n-- TOC entry (?P<number>\d+) \(class (?P<class>\d+) OID (?P<oid>\d+)\)\n"
    r"(?:-- Dependencies: (?P<needs>[\d ]+)\n)?"
    r"-- Name: (?P<name>.*); Type: (?P<type>[A-Z ]+); Schema: (?P<schema>.*?); Owner: (?P<owner>.*)\n"
    r"(?:-- Data Pos: \d+\n)?--\n",
    re.MULTILINE | re.ASCII,
)
_SETTING: Final = re.compile(r"\n(SET (default_\w+) = [^;\n]*;)\s*\Z", re.ASCII)
_END: Final = re.compile(
    r"\n(?:-- Completed on [^\n]*\n\n)?--\n-- PostgreSQL database dump complete\n--\n(?:\n\\unrestrict \w+\n)?\s*\Z", re.ASCII
)
_OWN_SCHEMA: Final = '"subscriber"'
_LEFT_OUT: Final = ("SUBSCRIPTION", "PUBLICATION", "EVENT TRIGGER")
_CHANGED_BY: Final = {"lc_monetary": ("money", "constants of type money"), "standard_conforming_strings": ("\\", "texts with a backslash")}
"""What a setting that pg_dump does not make itself changes in a schema."""
_OF_OBJECT: Final = frozenset({"COMMENT", "SECURITY LABEL", "ACL"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the archive.

    Attributes:
        number: identifies it.
        type: as pg_dump names it: ``TABLE``, ``INDEX``, ``FK CONSTRAINT``.
        schema: of the object; ``-`` if it has none.
        name: of the object; for a constraint or a trigger, with the table's name before it.
        owner: of the object on the publisher.
        sql: statements that create it.
        needs: the numbers of the entries that must exist before.
        before_data: whether pg_dump has it in its section pre-data.
        lacking: whether the target was found not to have it. Then it is an error that another object has its name.
    """

    number: int
    type: str
    schema: str
    name: str
    owner: str
    sql: str
    needs: frozenset[int]
    before_data: bool
    lacking: bool = False

    def __str__(self) -> str:
        place = self.name if self.schema == "-" else f"{self.schema}.{self.name}"
        return f"{self.type.lower()} {place}"

    @property
    def is_key(self) -> bool:
        """Whether changes are applied by it: a primary key, or the index of a replica identity."""
        return (self.type == "CONSTRAINT" and " PRIMARY KEY " in self.sql) or (
            self.type in {"CONSTRAINT", "INDEX"} and " REPLICA IDENTITY USING INDEX " in self.sql
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of the publisher's schema is copied.

    Attributes:
        schemas: only these; empty: all.
        exclude_schemas: not these.
        exclude_extensions: not these extensions.
        publications, event_triggers: whether those of the publisher are created in the target, too. Subscriptions never are.
        owners: whether owners and privileges are kept.
    """

    schemas: Sequence[str] = ()
    exclude_schemas: Sequence[str] = ()
    exclude_extensions: Sequence[str] = ()
    publications: bool = False
    event_triggers: bool = False
    owners: bool = False

    def has(self, entry: Entry) -> bool:
        """Whether an entry is copied."""
        subject = entry.name if entry.type in _OF_OBJECT else entry.type
        if entry.type in _OF_OBJECT and subject.startswith("EXTENSION "):
            # only the extension's owner may do this, and CREATE EXTENSION has done it already
            return False
        if entry.type == "EXTENSION":
            return entry.name not in self.exclude_extensions
        kept = {"PUBLICATION": self.publications, "EVENT TRIGGER": self.event_triggers}
        return all(kept.get(kind, False) for kind in _LEFT_OUT if subject == kind or subject.startswith(f"{kind} "))


async def read_archive(session: Session, conninfo: str, programs: ClientPrograms, selection: Selection) -> list[Entry]:
    """Read the publisher's schema. An entry comes after those that it needs.

    Args:
        session: with the publisher.
        conninfo: its connection string.
        programs: pg_dump and pg_restore.
        selection: what is read.

    Raises:
        ConfigurationError: a pooler does not let pg_dump make a setting that it needs.
        PublisherError: pg_dump failed.
    """
    with tempfile.TemporaryDirectory(prefix="subscriber-schema-") as directory:
        archive = str(Path(directory) / "archive")
        options = ["--format=custom", "--schema-only", "--encoding=UTF8", "--no-subscriptions", "--no-tablespaces"]
        options += [] if selection.publications else ["--no-publications"]
        options += [] if selection.owners else ["--no-owner", "--no-privileges"]
        options += ["--strict-names"] if selection.schemas else []
        options += [f"--schema={_pattern(name)}" for name in selection.schemas]
        options += [f"--exclude-schema={_pattern(name)}" for name in selection.exclude_schemas]
        address = session.address(conninfo, "" if session.pooled else as_options(session.pgconn.server_version))
        options += [f"--exclude-schema={_OWN_SCHEMA}", f"--file={archive}", f"--dbname={address}"]
        # the same servers are refused as by this session
        environment = {"PGPASSWORD": session.pgconn.password.decode(), "PGREQUIREAUTH": session.required_authentication}
        await run_program(programs.pg_dump, options, env=environment)
        shown = ["--no-owner", "--no-privileges"] if not selection.owners else []
        listed = await run_program(programs.pg_restore, ["--list", archive])
        before = await run_program(programs.pg_restore, ["--list", "--section=pre-data", archive])
        script = await run_program(programs.pg_restore, ["--verbose", "--file=-", "--no-tablespaces", *shown, archive])
    found = _entries(script, set(_LISTED.findall(listed)), {int(number) for number, _, _ in _LISTED.findall(before)})
    entries = [entry for entry in found if selection.has(entry)]
    if session.pooled:
        await _check_defaults(session, entries)
    return entries


async def _check_defaults(session: Session, entries: Sequence[Entry]) -> None:
    for name, (text, what) in _CHANGED_BY.items():
        ((default,),) = await session.execute(f"SELECT reset_val FROM pg_catalog.pg_settings WHERE name = '{name}'")  # noqa: S608 (ours)
        if default != PINNED[name] and any(text in entry.sql for entry in entries):
            raise ConfigurationError(
                f"pg_dump cannot set {name} through a connection pooler, and its default {default} changes {what}",
                hint=f"connect to the publisher itself, or ALTER ROLE … SET {name} = '{PINNED[name]}' for the role there",
            )


def _pattern(name: str) -> str:
    """The pattern of pg_dump that matches exactly this name."""
    return '"' + name.replace('"', '""') + '"'


def _headers(script: str, expected: set[tuple[str, str, str]]) -> Iterator[re.Match[str]]:
    left = set(expected)
    for header in _HEADER.finditer(script):
        numbers = (header["number"], header["class"], header["oid"])
        if numbers in left:
            left.remove(numbers)
            yield header


def _entries(script: str, expected: set[tuple[str, str, str]], before_data: set[int]) -> Iterator[Entry]:
    script = _END.sub("\n", script)
    headers = list(_headers(script, expected))
    settings: dict[str, str] = {}
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        text = script[header.end() : following.start() if following else len(script)]
        later: list[re.Match[str]] = []
        while found := _SETTING.search(text):
            later.append(found)
            text = text[: found.start() + 1]
        number = int(header["number"])
        yield Entry(
            number=number,
            type=header["type"],
            schema=header["schema"],
            name=header["name"],
            owner=header["owner"],
            sql="\n".join([*settings.values(), text.strip()]),
            needs=frozenset(map(int, (header["needs"] or "").split())) - {number},
            before_data=number in before_data,
        )
        settings |= {found[2]: found[1] for found in reversed(later)}
