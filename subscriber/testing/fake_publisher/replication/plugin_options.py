"""The options of START_REPLICATION by plugin, checked in the words of pgoutput.c; and how each plugin gets its messages.

pgoutput's messages are encoded. Another plugin (``test_decoding``, ``wal2json``, …) is fed with the same messages by
:class:`subscriber.plugins.feed.PluginFeed`, and writes records. It sees all tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from subscriber.errors import SubscriberError
from subscriber.plugins.context import LogicalDecodingContext, Record
from subscriber.plugins.feed import PluginFeed
from subscriber.plugins.registry import BUILTIN, find_plugin
from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Message
from subscriber.testing.fake_publisher.publications import Publication
from subscriber.testing.fake_publisher.replication.pgoutput import PgOutputOptions
from subscriber.testing.fake_publisher.server_errors import ServerError

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.publisher import FakePublisher

__all__ = ["Plugin", "is_known", "read_options"]

_NAME: Final = re.compile(r'\s*(?:"((?:[^"]|"")*)"|([^",\s]+))\s*(?:,|$)')
_TRUE: Final = frozenset({"true", "on", "1"})
_FALSE: Final = frozenset({"false", "off", "0"})
_KNOWN: Final = {"proto_version": 13, "publication_names": 13, "binary": 14, "messages": 14, "streaming": 14, "two_phase": 15, "origin": 16}
"""The options of pgoutput, each with the version that brought it."""
_NEVER: Final = 1000
_UINT32: Final = 0xFFFF_FFFF


def is_known(plugin: str) -> bool:
    """Whether slots with this plugin can be created."""
    return plugin in BUILTIN


class Plugin:
    """The plugin of one session.

    Attributes:
        options: for the decoding.
    """

    def __init__(self, options: PgOutputOptions, publications: Callable[[], Iterable[Publication]]) -> None:
        self.options = options
        self.publications = publications
        self._write: Callable[[Lsn, bytes], None] | None = None

    @property
    def two_phase(self) -> bool:
        """Whether the client asked for prepared transactions."""
        return self.options.two_phase

    def attach(self, write: Callable[[Lsn, bytes], None]) -> None:
        """Set who gets the bytes."""
        self._write = write

    def message(self, lsn: Lsn, message: Message) -> None:
        """Give a message of pgoutput."""
        self.write(lsn, encode(message))

    def write(self, lsn: Lsn, data: bytes) -> None:
        """Give bytes to the client."""
        assert self._write is not None
        self._write(lsn, data)


class _FedPlugin(Plugin):
    """Another plugin than pgoutput."""

    def __init__(self, name: str, options: Mapping[str, str | None], publisher: FakePublisher) -> None:
        caps = publisher.caps
        self._lsn = Lsn(0)
        self._feed = PluginFeed(
            find_plugin(name),
            LogicalDecodingContext(
                name,
                options,
                capabilities=caps,
                writer=self._record,
                types=publisher.types.registry,
                streaming=caps.streaming,
                two_phase=caps.two_phase,
            ),
        )
        try:
            self._feed.start()
        except SubscriberError as error:
            raise ServerError("22023", str(error)) from error
        context = self._feed.context
        found = PgOutputOptions(
            protocol_version=caps.protocol_version,
            publications=(),
            streaming="parallel" if context.streaming and caps.parallel_streaming else "on" if context.streaming else "off",
            messages=True,
        )
        super().__init__(found, publisher.everything)

    def message(self, lsn: Lsn, message: Message) -> None:
        self._lsn = lsn
        self._feed.message(message)

    def _record(self, record: Record) -> None:
        self.write(self._lsn, record.data)


def read_options(plugin: str, options: Sequence[tuple[str, str | None]], publisher: FakePublisher) -> Plugin:
    """Check the options.

    Raises:
        ServerError: one is missing, unknown to the version, or not valid.
    """
    if plugin != "pgoutput":
        return _FedPlugin(plugin, dict(options), publisher)
    found = _pgoutput_options(options, publisher)

    def publications() -> list[Publication]:
        missing = [name for name in found.publications if name not in publisher.publications]
        if missing:
            raise ServerError("42704", f'publication "{missing[0]}" does not exist', fatal=True)
        return [publisher.publications[name] for name in found.publications]

    return Plugin(found, publications)


def _pgoutput_options(given: Sequence[tuple[str, str | None]], publisher: FakePublisher) -> PgOutputOptions:
    caps = publisher.caps
    found: dict[str, Any] = {}
    for name, text in given:
        if not caps.at_least(_KNOWN.get(name, _NEVER)):
            raise ServerError("XX000", f"unrecognized pgoutput option: {name}")
        if name in found:
            raise ServerError("42601", "conflicting or redundant options")
        found[name] = _value(name, text, caps)
    checked = caps.at_least(17)
    for name in ("proto_version", "publication_names"):
        if name not in found and checked:
            raise ServerError("22023", f'option "{name}" missing')
    version, streaming, two_phase = found.get("proto_version", 0), found.get("streaming", "off"), found.get("two_phase", False)
    if not 1 <= version <= caps.protocol_version:
        limit = "1 or higher" if version < 1 else f"{caps.protocol_version} or lower"
        supports = "server only supports" if caps.at_least(16) else "we only support"
        raise ServerError("0A000", f"client sent proto_version={version} but {supports} protocol {limit}")
    if not found.get("publication_names") and not checked:
        raise ServerError("22023", "publication_names parameter missing")
    for asked, what, needed in (
        (streaming == "parallel", "parallel streaming", 4),
        (streaming != "off", "streaming", 2),
        (two_phase, "two-phase commit", 3),
    ):
        if asked and version < needed:
            raise ServerError("22023", f"requested proto_version={version} does not support {what}, need {needed} or higher")
    return PgOutputOptions(
        protocol_version=version,
        publications=found["publication_names"],
        streaming=streaming,
        two_phase=two_phase,
        binary=found.get("binary", False),
        messages=found.get("messages", False),
        only_local=found.get("origin") == "none",
    )


def _value(name: str, text: str | None, caps: Capabilities) -> Any:
    """The value of an option."""
    parallel = caps.parallel_streaming
    match name:
        case "proto_version":
            # as strtoul
            if not re.fullmatch(r"\s*[+-]?[0-9]+", text or "0" * caps.at_least(15)) or abs(int(text or "0")) >= 1 << 64:
                raise ServerError("22023", "invalid proto_version")
            if int(text or "0") % (1 << 64) > _UINT32:
                raise ServerError("22023", f'proto_version "{text}" out of range')
            return int(text or "0")
        case "publication_names":
            return _names(text or "")
        case "streaming" if parallel and (text or "").lower() == "parallel":
            return "parallel"
        case "streaming":
            return "on" if _flag(name, text, ' or "parallel"' if parallel else "") else "off"
        case "origin":
            if (text or "").lower() not in {"any", "none"}:
                raise ServerError("22023", f'unrecognized origin value: "{text or ""}"')
            return (text or "").lower()
    return _flag(name, text)


def _flag(name: str, text: str | None, others: str = "") -> bool:
    # as defGetBoolean
    found = (text or "true").lower()
    if found not in _TRUE | _FALSE:
        raise ServerError("42601", f"{name} requires a Boolean value{others}")
    return found in _TRUE


def _names(text: str) -> tuple[str, ...]:
    names: list[str] = []
    position = 0
    while position < len(text):
        found = _NAME.match(text, position)
        if found is None:
            raise ServerError("42602", "invalid publication_names syntax")
        names.append(found[1].replace('""', '"') if found[1] is not None else found[2].lower())
        position = found.end()
    if text.rstrip().endswith(","):
        raise ServerError("42602", "invalid publication_names syntax")
    return tuple(names)
