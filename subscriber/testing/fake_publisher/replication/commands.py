"""Read the commands of the replication protocol: one dataclass for each command.

Both grammars of CREATE_REPLICATION_SLOT are read: key words, as all versions know them, and options in parentheses (15). What a version
lacks is a syntax error there, and here too.

Source: PostgreSQL manual, Streaming Replication Protocol; repl_gram.y.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.testing.fake_publisher.errors import ServerError

__all__ = [
    "AlterSlot",
    "Command",
    "CreateSlot",
    "DropSlot",
    "IdentifySystem",
    "ReadSlot",
    "Show",
    "StartReplication",
    "TimelineHistory",
    "parse_command",
]

_TOKEN: Final = re.compile(
    r"""\s*(?: (?P<lsn>[0-9A-Fa-f]+/[0-9A-Fa-f]+) | (?P<number>\d+) | (?P<word>[A-Za-z_][A-Za-z0-9_.$]*)
          | "(?P<identifier>(?:[^"]|"")*)" | '(?P<literal>(?:[^']|'')*)' | (?P<sign>[(),;]) )""",
    re.VERBOSE,
)
_FIRST_WORDS: Final = frozenset(
    {
        "IDENTIFY_SYSTEM",
        "SHOW",
        "CREATE_REPLICATION_SLOT",
        "DROP_REPLICATION_SLOT",
        "ALTER_REPLICATION_SLOT",
        "READ_REPLICATION_SLOT",
        "START_REPLICATION",
        "TIMELINE_HISTORY",
        "BASE_BACKUP",
        "UPLOAD_MANIFEST",
    }
)


@dataclass(frozen=True, slots=True)
class IdentifySystem:
    """IDENTIFY_SYSTEM."""


@dataclass(frozen=True, slots=True)
class Show:
    """SHOW name."""

    name: str


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    """TIMELINE_HISTORY tli."""

    timeline: int


@dataclass(frozen=True, slots=True)
class CreateSlot:
    """CREATE_REPLICATION_SLOT. ``plugin`` is None for a physical slot; ``snapshot`` is ``export``, ``use`` or ``nothing``."""

    name: str
    plugin: str | None
    temporary: bool = False
    snapshot: str = "export"
    two_phase: bool = False
    failover: bool = False


@dataclass(frozen=True, slots=True)
class DropSlot:
    """DROP_REPLICATION_SLOT."""

    name: str
    wait: bool


@dataclass(frozen=True, slots=True)
class AlterSlot:
    """ALTER_REPLICATION_SLOT. None leaves a property as it is."""

    name: str
    failover: bool | None
    two_phase: bool | None


@dataclass(frozen=True, slots=True)
class ReadSlot:
    """READ_REPLICATION_SLOT."""

    name: str


@dataclass(frozen=True, slots=True)
class StartReplication:
    """START_REPLICATION SLOT … LOGICAL. An option without a value has None."""

    slot: str
    lsn: Lsn
    options: Mapping[str, str | None] = field(default_factory=dict)


Command = IdentifySystem | Show | TimelineHistory | CreateSlot | DropSlot | AlterSlot | ReadSlot | StartReplication


def parse_command(text: str, caps: Capabilities) -> Command | None:
    """Read a command. None: the text is not a replication command, but SQL.

    Raises:
        ServerError: a syntax error, or something that the version lacks.
    """
    first = re.match(r"\s*([A-Za-z_]+)", text)
    if first is None or first[1].upper() not in _FIRST_WORDS:
        return None
    return _Parser(text, caps).command()


class _Parser:
    def __init__(self, text: str, caps: Capabilities) -> None:
        self._caps = caps
        self._tokens: list[tuple[str, str]] = []
        position = 0
        text = text.rstrip()
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                raise _syntax_error(text[position:].strip()[:20])
            kind = found.lastgroup or ""
            value = found[kind]
            if kind == "identifier":
                value = value.replace('""', '"')
            elif kind == "literal":
                value = value.replace("''", "'")
            self._tokens.append((kind, value))
            position = found.end()
        if self._tokens and self._tokens[-1] == ("sign", ";"):
            self._tokens.pop()
        self._next = 0

    def command(self) -> Command:
        word = self._word()
        match word:
            case "IDENTIFY_SYSTEM":
                found: Command = IdentifySystem()
            case "SHOW":
                found = Show(self._take("word", "identifier"))
            case "TIMELINE_HISTORY":
                timeline = int(self._take("number"))
                if timeline <= 0:
                    raise ServerError("42601", f"invalid timeline {timeline}")
                found = TimelineHistory(timeline)
            case "CREATE_REPLICATION_SLOT":
                found = self._create_slot()
            case "DROP_REPLICATION_SLOT":
                found = DropSlot(self._name(), self._accept("WAIT"))
            case "ALTER_REPLICATION_SLOT" if self._caps.alter_slot:
                found = self._alter_slot()
            case "READ_REPLICATION_SLOT" if self._caps.slot_options_syntax:
                found = ReadSlot(self._name())
            case "START_REPLICATION":
                found = self._start()
            case "BASE_BACKUP" | "UPLOAD_MANIFEST":
                raise ServerError("0A000", f"the fake publisher has no {word}", hint="use a server of subscriber.testing.server")
            case _:
                raise _syntax_error(word)
        if self._next < len(self._tokens):
            raise _syntax_error(self._tokens[self._next][1])
        return found

    def _create_slot(self) -> CreateSlot:
        name = self._name()
        temporary = self._accept("TEMPORARY")
        if self._accept("PHYSICAL"):
            reserve = self._options() if self._peek("(") else {}
            if not reserve:
                self._accept("RESERVE_WAL")
            return CreateSlot(name, None, temporary, "nothing")
        self._expect("LOGICAL")
        plugin = self._name()
        options = self._slot_options() if self._peek("(") else self._legacy_slot_options()
        snapshot = (options.pop("snapshot", None) or "export").lower()
        if snapshot not in {"export", "use", "nothing"}:
            raise ServerError("42601", f'unrecognized value for CREATE_REPLICATION_SLOT option "snapshot": "{snapshot}"')
        two_phase, failover = _boolean(options, "two_phase"), _boolean(options, "failover")
        return CreateSlot(name, plugin, temporary, snapshot, bool(two_phase), bool(failover))

    def _slot_options(self) -> dict[str, str | None]:
        if not self._caps.slot_options_syntax:
            raise _syntax_error("(")
        options = {name.lower(): value for name, value in self._options().items()}
        for name in options:
            if name not in {"snapshot", "two_phase", "reserve_wal"} and not (name == "failover" and self._caps.failover_slots):
                raise ServerError("42601", f"unrecognized option: {name}")
        return options

    def _legacy_slot_options(self) -> dict[str, str | None]:
        options: dict[str, str | None] = {}
        words = {"EXPORT_SNAPSHOT": "export", "NOEXPORT_SNAPSHOT": "nothing", "USE_SNAPSHOT": "use"}
        while self._next < len(self._tokens):
            word = self._word()
            if word in words:
                options["snapshot"] = words[word]
            elif word == "TWO_PHASE" and self._caps.at_least(14):
                options["two_phase"] = None
            else:
                raise _syntax_error(word)
        return options

    def _alter_slot(self) -> AlterSlot:
        name = self._name()
        options = {option.lower(): value for option, value in self._options().items()}
        for option in options:
            if option != "failover" and not (option == "two_phase" and self._caps.at_least(18)):
                raise ServerError("42601", f"unrecognized option: {option}")
        return AlterSlot(name, _boolean(options, "failover"), _boolean(options, "two_phase"))

    def _start(self) -> StartReplication:
        slot = ""
        if self._accept("SLOT"):
            slot = self._name()
        if self._accept("PHYSICAL") or not self._accept("LOGICAL"):
            raise ServerError("0A000", "the fake publisher has no physical replication", hint="use START_REPLICATION SLOT … LOGICAL")
        lsn = Lsn.parse(self._take("lsn"))
        return StartReplication(slot, lsn, self._options() if self._peek("(") else {})

    def _options(self) -> dict[str, str | None]:
        self._expect("(")
        options: dict[str, str | None] = {}
        while not self._accept(")"):
            if options:
                self._expect(",")
            name = self._take("word", "identifier")
            value: str | None = None
            if self._next < len(self._tokens) and self._tokens[self._next][0] in {"literal", "word", "number", "identifier"}:
                value = self._take("literal", "word", "number", "identifier")
            options[name] = value
        return options

    def _peek(self, value: str) -> bool:
        return self._next < len(self._tokens) and self._tokens[self._next][1].upper() == value

    def _accept(self, value: str) -> bool:
        found = self._peek(value) and self._tokens[self._next][0] in {"word", "sign"}
        self._next += found
        return found

    def _expect(self, value: str) -> None:
        if not self._accept(value):
            raise _syntax_error(self._shown())

    def _take(self, *kinds: str) -> str:
        if self._next >= len(self._tokens) or self._tokens[self._next][0] not in kinds:
            raise _syntax_error(self._shown())
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _word(self) -> str:
        return self._take("word").upper()

    def _name(self) -> str:
        if self._next < len(self._tokens) and self._tokens[self._next][0] == "word":
            return self._take("word").lower()
        return self._take("identifier")

    def _shown(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else "end of input"


def _syntax_error(near: str) -> ServerError:
    return ServerError("42601", f'syntax error at or near "{near}"')


def _boolean(options: Mapping[str, str | None], name: str) -> bool | None:
    if name not in options:
        return None
    text = (options[name] or "true").lower()
    if text not in {"true", "on", "1", "false", "off", "0"}:
        raise ServerError("42601", f"{name} requires a Boolean value")
    return text in {"true", "on", "1"}
