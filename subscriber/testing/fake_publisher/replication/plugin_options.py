"""The options of START_REPLICATION by plugin, checked in the words of pgoutput.c; and how each plugin gets its messages.

pgoutput's messages are encoded. Another plugin (``test_decoding``, ``wal2json``, …) is fed with the same messages by
:class:`subscriber.plugins.feed.PluginFeed`, and writes records. It sees all tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from subscriber.errors import SubscriberError
from subscriber.plugins.context import Record
from subscriber.plugins.feed import PluginFeed
from subscriber.plugins.registry import BUILTIN, find_plugin
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Message
from subscriber.testing.fake_publisher.errors import ServerError
from subscriber.testing.fake_publisher.publications import Publication
from subscriber.testing.fake_publisher.replication.pgoutput import PgOutputOptions

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.publisher import FakePublisher

__all__ = ["Plugin", "is_known", "read_options"]

_NAME: Final = re.compile(r'\s*(?:"((?:[^"]|"")*)"|([^",\s]+))\s*(?:,|$)')
_TRUE: Final = frozenset({"true", "on", "1", "t", "yes", "y"})
_FALSE: Final = frozenset({"false", "off", "0", "f", "no", "n"})
_KNOWN: Final = ("proto_version", "publication_names", "binary", "messages", "streaming", "two_phase", "origin")


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
            name,
            options,
            capabilities=caps,
            writer=self._record,
            types=publisher.types.registry,
            streaming=caps.streaming,
            two_phase=caps.two_phase,
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


def read_options(plugin: str, options: Mapping[str, str | None], publisher: FakePublisher) -> Plugin:
    """Check the options.

    Raises:
        ServerError: one is missing, unknown to the version, or not valid.
    """
    if plugin != "pgoutput":
        return _FedPlugin(plugin, options, publisher)
    found = _pgoutput_options(options, publisher)

    def publications() -> list[Publication]:
        missing = [name for name in found.publications if name not in publisher.publications]
        if missing:
            raise ServerError("42704", f'publication "{missing[0]}" does not exist', fatal=True)
        return [publisher.publications[name] for name in found.publications]

    return Plugin(found, publications)


def _pgoutput_options(options: Mapping[str, str | None], publisher: FakePublisher) -> PgOutputOptions:
    caps = publisher.caps
    since = {"binary": 14, "messages": 14, "streaming": 14, "two_phase": 15, "origin": 16}
    for name in options:
        if name not in _KNOWN or not caps.at_least(since.get(name, 13)):
            raise ServerError("XX000", f"unrecognized pgoutput option: {name}")
    for name in ("proto_version", "publication_names"):
        if not options.get(name):
            raise ServerError("22023", _missing(name, named=caps.at_least(16)))
    version_text = options["proto_version"] or ""
    if not version_text.isdigit():
        raise ServerError("22023", f'invalid proto_version "{version_text}"')
    version = int(version_text)
    if version > caps.protocol_version:
        raise ServerError(
            "0A000", f"client sent proto_version={version} but server only supports protocol {caps.protocol_version} or lower"
        )
    if version < 1:
        raise ServerError("0A000", f"client sent proto_version={version} but server only supports protocol 1 or higher")
    streaming = _streaming(options, parallel=caps.parallel_streaming)
    if streaming != "off" and version < 2:
        raise ServerError("0A000", f"requested proto_version={version} does not support streaming, need 2 or higher")
    if streaming == "parallel" and version < 4:
        raise ServerError("0A000", f"requested proto_version={version} does not support parallel streaming, need 4 or higher")
    two_phase = _flag(options, "two_phase")
    if two_phase and version < 3:
        raise ServerError("0A000", f"requested proto_version={version} does not support two-phase commit, need 3 or higher")
    origin = (options.get("origin") or "any").lower()
    if origin not in {"any", "none"}:
        raise ServerError("22023", f'unrecognized origin value: "{origin}"')
    return PgOutputOptions(
        protocol_version=version,
        publications=_names(options["publication_names"] or ""),
        streaming=streaming,
        two_phase=two_phase,
        binary=_flag(options, "binary"),
        messages=_flag(options, "messages"),
        only_local=origin == "none",
    )


def _missing(name: str, *, named: bool) -> str:
    if named:
        return f'option "{name}" missing'
    return "proto_version option missing" if name == "proto_version" else "publication_names parameter missing"


def _streaming(options: Mapping[str, str | None], *, parallel: bool) -> str:
    if parallel and (options.get("streaming") or "").lower() == "parallel":
        return "parallel"
    return "on" if _flag(options, "streaming") else "off"


def _flag(options: Mapping[str, str | None], name: str) -> bool:
    if name not in options:
        return False
    text = (options[name] or "true").lower()
    if text not in _TRUE | _FALSE:
        raise ServerError("42601", f"{name} requires a Boolean value")
    return text in _TRUE


def _names(text: str) -> tuple[str, ...]:
    names: list[str] = []
    position = 0
    while position < len(text):
        found = _NAME.match(text, position)
        if found is None:
            raise ServerError("42602", "invalid publication_names syntax")
        names.append(found[1].replace('""', '"') if found[1] is not None else found[2].lower())
        position = found.end()
    return tuple(names)
