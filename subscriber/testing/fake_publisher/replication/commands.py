"""Read the commands of the replication protocol: one dataclass for each command.

Both grammars of CREATE_REPLICATION_SLOT are read: key words, as all versions know them, and options in parentheses (15). What a version
lacks is a syntax error there, and here too. Key words are in upper case only; other text is SQL.

Source: PostgreSQL manual, Streaming Replication Protocol; repl_gram.y.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.testing.fake_publisher.server_errors import ServerError

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
    "is_command",
    "parse_command",
]

_TOKEN: Final = re.compile(
    r"""\s*(?: (?P<lsn>[0-9A-Fa-f]+/[0-9A-Fa-f]+) | (?P<number>\d+) | (?P<word>[A-Za-z_][A-Za-z0-9_.$]*)
          | "(?P<identifier>(?:[^"]|"")*)" | '(?P<literal>(?:[^']|'')*)' | (?P<sign>[(),;]) )""",
    re.VERBOSE,
)
_NAME_LENGTH: Final = 63
_NEVER: Final = 1000
_FIRST_WORDS: Final = {
    "IDENTIFY_SYSTEM": 13,
    "SHOW": 13,
    "CREATE_REPLICATION_SLOT": 13,
    "DROP_REPLICATION_SLOT": 13,
    "ALTER_REPLICATION_SLOT": 17,
    "READ_REPLICATION_SLOT": 15,
    "START_REPLICATION": 13,
    "TIMELINE_HISTORY": 13,
    "BASE_BACKUP": 13,
    "UPLOAD_MANIFEST": 17,
}
"""The commands, each with the version that brought it. Earlier ones take it for SQL."""


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
    options: Sequence[tuple[str, str | None]] = ()


Command = IdentifySystem | Show | TimelineHistory | CreateSlot | DropSlot | AlterSlot | ReadSlot | StartReplication


def parse_command(text: str, caps: Capabilities) -> Command | None:
    """Read a command. None: the text is not a replication command, but SQL.

    Raises:
        ServerError: a syntax error, or something that the version lacks.
    """
    first = re.match(r"\s*([A-Za-z_]+)", text)
    if first is None or not caps.at_least(_FIRST_WORDS.get(first[1], _NEVER)):
        return None
    return _Parser(text, caps).command()


def is_command(text: str) -> str | None:
    """The first word, if it is that of a replication command in upper or lower case. In SQL it is a syntax error."""
    first = re.match(r"\s*([A-Za-z_]+)", text)
    return first[1] if first is not None and first[1].upper() in _FIRST_WORDS and first[1].upper() != "SHOW" else None


class _Parser:
    def __init__(self, text: str, caps: Capabilities) -> None:
        self._caps = caps
        self._tokens: list[tuple[str, str]] = []
        position = 0
        text = text.rstrip()
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                raise _syntax_error()
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
            case "ALTER_REPLICATION_SLOT":
                found = self._alter_slot()
            case "READ_REPLICATION_SLOT":
                found = ReadSlot(self._name())
            case "START_REPLICATION":
                found = self._start()
            case "BASE_BACKUP" | "UPLOAD_MANIFEST":
                raise ServerError("0A000", f"the fake publisher has no {word}", hint="use a server of subscriber.testing.server")
            case _:
                raise _syntax_error()
        if self._next < len(self._tokens):
            raise _syntax_error()
        return found

    def _create_slot(self) -> CreateSlot:
        name = self._name()
        temporary = self._accept("TEMPORARY")
        if self._accept("PHYSICAL"):
            reserve = self._options("word", "literal", "number") if self._peek("(") else []
            if not reserve:
                self._accept("RESERVE_WAL")
            return CreateSlot(name, None, temporary, "nothing")
        self._expect("LOGICAL")
        plugin = self._name()
        options = self._slot_options() if self._peek("(") else self._legacy_slot_options()
        snapshot = _text(options, "snapshot", "export")
        if snapshot not in {"export", "use", "nothing"}:
            raise ServerError("22023", f'unrecognized value for CREATE_REPLICATION_SLOT option "snapshot": "{snapshot}"')
        two_phase, failover = _boolean(options, "two_phase"), _boolean(options, "failover")
        return CreateSlot(name, plugin, temporary, snapshot, bool(two_phase), bool(failover))

    def _slot_options(self) -> dict[str, str | None]:
        if not self._caps.slot_options_syntax:
            raise _syntax_error()
        options = self._properties()
        for name in options:
            if name == "reserve_wal":
                # for physical slots
                raise ServerError("42601", "conflicting or redundant options")
            if name not in {"snapshot", "two_phase"} and not (name == "failover" and self._caps.failover_slots):
                raise ServerError("XX000", f"unrecognized option: {name}")
        return options

    def _properties(self) -> dict[str, str | None]:
        """The options of a slot: in lower case, and each once."""
        options: dict[str, str | None] = {}
        for name, value in self._options("literal", "word", "number", "identifier"):
            if name.lower() in options:
                raise ServerError("42601", "conflicting or redundant options")
            options[name.lower()] = value
        return options

    def _legacy_slot_options(self) -> dict[str, str | None]:
        options: dict[str, str | None] = {}
        words = {"EXPORT_SNAPSHOT": "export", "NOEXPORT_SNAPSHOT": "nothing", "USE_SNAPSHOT": "use"}
        while self._next < len(self._tokens):
            word = self._word()
            name = "snapshot" if word in words else "two_phase"
            if word not in words and not (word == "TWO_PHASE" and self._caps.at_least(15)):
                raise _syntax_error()
            if name in options:
                raise ServerError("42601", "conflicting or redundant options")
            options[name] = words.get(word)
        return options

    def _alter_slot(self) -> AlterSlot:
        name = self._name()
        options = self._properties()
        for option in options:
            if option != "failover" and not (option == "two_phase" and self._caps.at_least(18)):
                raise ServerError("XX000", f"unrecognized option: {option}")
        return AlterSlot(name, _boolean(options, "failover"), _boolean(options, "two_phase"))

    def _start(self) -> StartReplication:
        slot = self._name() if self._accept("SLOT") else None
        if slot is None and self._peek("LOGICAL"):
            raise _syntax_error()
        if slot is None or self._accept("PHYSICAL") or not self._accept("LOGICAL"):
            raise ServerError("0A000", "the fake publisher has no physical replication", hint="use START_REPLICATION SLOT … LOGICAL")
        high, low = self._take("lsn").split("/")
        # as sscanf does: what is too long loses its first digits
        lsn = Lsn.parse(f"{high[-8:]}/{low[-8:]}")
        return StartReplication(slot, lsn, self._options("literal") if self._peek("(") else ())

    def _options(self, *kinds: str) -> list[tuple[str, str | None]]:
        """Options in parentheses, at least one. Their values are of these kinds, or missing."""
        self._expect("(")
        options: list[tuple[str, str | None]] = []
        while not (options and self._accept(")")):
            if options:
                self._expect(",")
            name = self._name()
            has_value = self._next < len(self._tokens) and self._tokens[self._next][0] in kinds
            options.append((name, self._take(*kinds) if has_value else None))
        return options

    def _peek(self, value: str) -> bool:
        return self._next < len(self._tokens) and self._tokens[self._next][1] == value

    def _accept(self, value: str) -> bool:
        found = self._peek(value) and self._tokens[self._next][0] in {"word", "sign"}
        self._next += found
        return found

    def _expect(self, value: str) -> None:
        if not self._accept(value):
            raise _syntax_error()

    def _take(self, *kinds: str) -> str:
        if self._next >= len(self._tokens) or self._tokens[self._next][0] not in kinds:
            raise _syntax_error()
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _word(self) -> str:
        return self._take("word")

    def _name(self) -> str:
        if self._next < len(self._tokens) and self._tokens[self._next][0] == "word":
            return self._take("word").lower()[:_NAME_LENGTH]
        return self._take("identifier")[:_NAME_LENGTH]


def _syntax_error() -> ServerError:
    return ServerError("42601", "syntax error")


def _text(options: Mapping[str, str | None], name: str, default: str) -> str:
    found = options.get(name, default)
    if found is None:
        raise ServerError("42601", f"{name} requires a parameter")
    return found


def _boolean(options: Mapping[str, str | None], name: str) -> bool | None:
    if name not in options:
        return None
    text = (options[name] or "true").lower()
    if text not in {"true", "on", "1", "false", "off", "0"}:
        raise ServerError("42601", f"{name} requires a Boolean value")
    return text in {"true", "on", "1"}
