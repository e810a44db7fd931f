"""Registration, options and output of a plugin, and the callbacks that messages become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from subscriber.errors import ConfigurationError, ProtocolError, SubscriberError, TargetError
from subscriber.plugins.callbacks import CALLBACKS, OutputPluginCallbacks
from subscriber.plugins.context import LogicalDecodingContext, OutputPluginOptions, OutputType, Record, ReorderBufferTXN
from subscriber.plugins.feed import PluginFeed
from subscriber.plugins.names import format_type, quote_identifier
from subscriber.plugins.registry import find_plugin
from subscriber.plugins.test_decoding import TestDecoding, timestamp
from subscriber.protocol.capabilities import capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Type,
)
from subscriber.protocol.quoting import quote_literal
from subscriber.types import TypeRegistry
from tests.support.sink_postgres import Remote, truncate

T = Remote("t", "*id", "v", relation_id=1)
REQUIRED = ("begin", "change", "commit")
STREAMING = ("stream_start", "stream_stop", "stream_abort", "stream_commit", "stream_change")
TWO_PHASE = ("begin_prepare", "prepare", "commit_prepared", "rollback_prepared")


class Recorder:
    """Has the named callbacks, which note their calls."""

    def __init__(self, *names: str, **answers: object) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        for name in names:
            setattr(self, name, self._callback(name, answers.get(name)))

    def _callback(self, name: str, answer: object) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            self.calls.append((name, arguments))
            return answer

        return called

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def fed(plugin: object, *messages: Message, version: int = 18, options: Mapping[str, str | None] | None = None) -> list[Record]:
    written: list[Record] = []
    given = options or {}
    feed = PluginFeed(
        plugin,
        LogicalDecodingContext(
            "mine", given, capabilities=capabilities(version * 10000), writer=written.append, streaming=True, two_phase=True
        ),
    )
    feed.start()
    for message in messages:
        feed.message(message)
    feed.shutdown()
    return written


def begun(xid: int = 5) -> Begin:
    return Begin(Lsn(0x100), 0, xid)


DONE = Commit(0, Lsn(0x100), Lsn(0x108), 0)


@pytest.mark.parametrize("missing", REQUIRED)
def test_required_callbacks(missing: str) -> None:
    with pytest.raises(ConfigurationError, match=f"output plugins have to register a {missing} callback"):
        OutputPluginCallbacks(Recorder(*(set(REQUIRED) - {missing})), "mine")


@pytest.mark.parametrize("missing", STREAMING)
def test_required_with_streaming(missing: str) -> None:
    with pytest.raises(ConfigurationError, match=f"logical streaming requires a {missing} callback"):
        OutputPluginCallbacks(Recorder(*REQUIRED, *(set(STREAMING) - {missing})), "mine")


@pytest.mark.parametrize("missing", TWO_PHASE)
def test_required_with_two_phase(missing: str) -> None:
    with pytest.raises(ConfigurationError, match=f"logical replication at prepare time requires a {missing} callback"):
        OutputPluginCallbacks(Recorder(*REQUIRED, *(set(TWO_PHASE) - {missing})), "mine")


@pytest.mark.parametrize("name", ["stream_message", "stream_truncate", "filter_prepare"])
def test_an_optional_callback_needs_the_others(name: str) -> None:
    with pytest.raises(ConfigurationError, match="requires a"):
        OutputPluginCallbacks(Recorder(*REQUIRED, name), "mine")


def test_streaming_together_with_two_phase() -> None:
    with pytest.raises(ConfigurationError, match="requires a stream_prepare callback"):
        OutputPluginCallbacks(Recorder(*REQUIRED, *STREAMING, *TWO_PHASE), "mine")
    found = OutputPluginCallbacks(Recorder(*CALLBACKS), "mine")
    assert (found.streaming, found.two_phase) == (True, True)
    found = OutputPluginCallbacks(Recorder(*REQUIRED), "mine")
    assert (found.streaming, found.two_phase) == (False, False)


def test_a_callback_must_be_callable() -> None:
    plugin = Recorder(*REQUIRED)
    plugin.message = "text"  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="message is not a method"):
        OutputPluginCallbacks(plugin, "mine")


def test_order_of_callbacks() -> None:
    plugin = Recorder(*CALLBACKS)
    first, loose = LogicalMessage(True, Lsn(1), "p", b"x"), LogicalMessage(False, Lsn(2), "p", b"y")
    fed(plugin, begun(), T.relation, T.insert(1, "a"), loose, first, truncate(T), DONE)
    assert plugin.names == [
        "startup",
        *("filter_by_origin", "begin", "change", "message", "message", "truncate", "commit"),
        "shutdown",
    ]
    loose_call, transactional = [arguments for name, arguments in plugin.calls if name == "message"]
    assert loose_call[1:] == (None, Lsn(2), False, "p", b"y")
    assert transactional[1].xid == 5
    assert transactional[2:] == (Lsn(1), True, "p", b"x")
    assert plugin.calls[-2][1][2] == Lsn(0x100)


def test_missing_optional_callbacks_are_passed_over() -> None:
    plugin = Recorder(*REQUIRED)
    fed(plugin, begun(), T.relation, truncate(T), LogicalMessage(True, Lsn(1), "p", b"x"), DONE)
    assert plugin.names == ["begin", "commit"]


def test_origin_is_known_at_begin_and_filters() -> None:
    plugin = Recorder(*REQUIRED, "filter_by_origin")
    fed(plugin, begun(), Origin(Lsn(1), "other"), T.relation, T.insert(1, "a"), DONE)
    assert plugin.calls[0][1][1] == "other"
    assert plugin.calls[1][1][1].origin == "other"
    plugin = Recorder(*CALLBACKS, filter_by_origin=True)
    fed(plugin, begun(), Origin(Lsn(1), "other"), T.relation, T.insert(1, "a"), DONE)
    fed(plugin, StreamStart(6, True), Origin(Lsn(1), "other"), StreamStop(), StreamCommit(6, 0, Lsn(7), Lsn(8), 0))
    assert set(plugin.names) == {"startup", "filter_by_origin", "shutdown"}


def test_streamed_transactions() -> None:
    plugin = Recorder(*CALLBACKS)
    row = T.insert(1, "a")
    row.xid = 7
    described = T.relation
    messages: list[Message] = [StreamStart(6, True), described, row, LogicalMessage(True, Lsn(1), "p", b"", 7), StreamStop()]
    messages += [StreamStart(6, False), truncate(T), StreamStop(), StreamAbort(6, 7), StreamCommit(6, 0, Lsn(7), Lsn(8), 0)]
    fed(plugin, *messages, StreamAbort(9, 9))
    expected = ["filter_by_origin", "stream_start", "stream_change", "stream_message", "stream_stop"]
    expected += ["filter_by_origin", "stream_start", "stream_truncate", "stream_stop", "stream_abort", "stream_commit"]
    assert plugin.names[1:-1] == expected
    aborted = dict(plugin.calls)["stream_abort"][1]
    assert (aborted.xid, aborted.toptxn.xid) == (7, 6)


def test_a_filtered_prepare_waits_for_its_end() -> None:
    plugin = Recorder(*CALLBACKS, filter_prepare=True)
    written: list[Record] = []
    feed = PluginFeed(plugin, LogicalDecodingContext("mine", {}, capabilities=capabilities(180000), writer=written.append, two_phase=True))
    feed.start()
    for xid in (5, 6):
        for message in (BeginPrepare(Lsn(1), Lsn(2), 0, xid, "g"), T.relation, T.insert(1, "a"), Prepare(0, Lsn(1), Lsn(2), 0, xid, "g")):
            feed.message(message)
    assert feed.holding
    assert "begin_prepare" not in plugin.names
    feed.message(CommitPrepared(0, Lsn(8), Lsn(9), 0, 5, "g"))
    assert plugin.names[-3:] == ["begin", "change", "commit"]
    feed.message(RollbackPrepared(0, Lsn(2), Lsn(9), 0, 0, 6, "g"))
    assert plugin.names[-1] == "commit"
    assert not feed.holding


def test_a_filtered_prepare_of_a_streamed_transaction() -> None:
    plugin = Recorder(*CALLBACKS, filter_prepare=True)
    written: list[Record] = []
    feed = PluginFeed(
        plugin, LogicalDecodingContext("mine", {}, capabilities=capabilities(180000), writer=written.append, streaming=True, two_phase=True)
    )
    feed.start()
    for xid in (5, 6):
        for message in (StreamStart(xid, True), T.relation, T.insert(1, "a"), StreamStop(), StreamPrepare(0, Lsn(1), Lsn(2), 0, xid, "g")):
            feed.message(message)
    assert feed.holding
    assert "stream_prepare" not in plugin.names
    feed.message(CommitPrepared(0, Lsn(8), Lsn(9), 0, 5, "g"))
    assert plugin.names[-1] == "stream_commit"
    feed.message(RollbackPrepared(0, Lsn(2), Lsn(9), 0, 0, 6, "g"))
    assert plugin.names[-1] == "stream_abort"
    assert not feed.holding


def test_messages_out_of_place() -> None:
    plain = Recorder(*REQUIRED)
    for message in (StreamStart(6, True), BeginPrepare(Lsn(1), Lsn(2), 0, 6, "g"), CommitPrepared(0, Lsn(1), Lsn(2), 0, 6, "g")):
        with pytest.raises(ProtocolError, match="although"):
            fed(plain, message)
    for misplaced in (DONE, T.insert(1, "a")):
        with pytest.raises(ProtocolError):
            fed(plain, misplaced)
    with pytest.raises(ProtocolError, match="no relation map entry"):
        fed(plain, begun(), T.insert(1, "a"))


class Writer:
    def __init__(self, output_type: OutputType, text: str | bytes) -> None:
        self._output_type = output_type
        self._text = text

    def startup(self, ctx: LogicalDecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        options.output_type = self._output_type

    def begin(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        ctx.prepare_write(False)
        ctx.out.append("part ")
        ctx.out.append(self._text)
        ctx.write(False)
        ctx.update_progress()

    def change(self, *_: object) -> None:
        raise KeyError("secret value of a row")

    def commit(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        ctx.emit("end")


def test_textual_and_binary_output() -> None:
    records = fed(Writer(OutputType.TEXTUAL, "ü"), begun(), DONE)
    assert [(record.data, record.last_write, record.xid) for record in records] == [("part ü".encode(), False, 5), (b"end", True, 5)]
    assert fed(Writer(OutputType.BINARY, b"\xff\0"), begun(), DONE)[0].data == b"part \xff\0"
    for text in (b"\xff", b"a\0b"):
        with pytest.raises(TargetError, match='wrote text that is not valid in encoding "UTF8"'):
            fed(Writer(OutputType.TEXTUAL, text), begun(), DONE)


def test_an_error_in_a_callback_tells_the_place_and_no_value() -> None:
    with pytest.raises(TargetError, match=r'output plugin "mine" raised KeyError in its change callback, at test_feed.py:\d+') as caught:
        fed(Writer(OutputType.TEXTUAL, ""), begun(), T.relation, T.insert(1, "a"), DONE)
    assert "secret" not in caught.value.one_line()
    assert isinstance(caught.value.__cause__, KeyError)


class Startled(Writer):
    def __init__(self, startup: Callable[[LogicalDecodingContext, OutputPluginOptions], None]) -> None:
        super().__init__(OutputType.TEXTUAL, "")
        self._startup = startup

    def startup(self, ctx: LogicalDecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        self._startup(ctx, options)


def rewrites(ctx: LogicalDecodingContext, options: OutputPluginOptions) -> None:
    options.receive_rewrites = True


@pytest.mark.parametrize(
    ("startup", "message"),
    [
        (lambda ctx, _: ctx.emit("early"), "writes are only accepted"),
        (lambda ctx, _: ctx.write(), "prepare_write needs to be called"),
        (rewrites, "rewrites"),
        (lambda ctx, _: ctx.unknown_options(("a", "b")), 'option "c" = "1" is unknown'),
    ],
)
def test_wrong_startup(startup: Callable[[LogicalDecodingContext, OutputPluginOptions], None], message: str) -> None:
    with pytest.raises(SubscriberError, match=message):
        fed(Startled(startup), options={"c": "1"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "does not send empty transactions"),
        ({"skip-empty-xacts": "on", "include-rewrites": "on"}, "rewrites"),
        ({"skip-empty-xacts": "maybe"}, 'could not parse value "maybe" for parameter "skip-empty-xacts"'),
        ({"colour": None}, r'option "colour" = "\(null\)" is unknown'),
    ],
)
def test_options_of_test_decoding(options: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fed(TestDecoding(), options=options)
    assert fed(TestDecoding(), version=14) == []


def test_stream_changes_needs_a_stream() -> None:
    options = {"skip-empty-xacts": "on", "stream-changes": "on"}
    feed = PluginFeed(TestDecoding(), LogicalDecodingContext("mine", options, capabilities=capabilities(180000), writer=print))
    with pytest.raises(ConfigurationError, match="transactions in progress"):
        feed.start()


def test_plugins_by_name() -> None:
    assert isinstance(find_plugin("test_decoding"), TestDecoding)
    for name, message in (
        ("nothing", 'no output plugin "nothing"'),
        ("no.such.module:X", "cannot import no"),
        ("subscriber.plugins.feed:Nothing", "has no class Nothing"),
        ("subscriber.plugins.feed:PluginFeed", "without arguments"),
        (":", "no output plugin"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            find_plugin(name)


def test_names() -> None:
    newest, old = capabilities(180000), capabilities(150000)
    assert [quote_identifier(name, newest) for name in ("a_1", "A", "1a", "select", 'q"', "json", "ü")] == [
        *("a_1", '"A"', '"1a"', '"select"', '"q"""', '"json"', '"ü"')
    ]
    assert quote_identifier("json", old) == "json"
    assert [quote_literal(text) for text in ("a'b", "a\\b")] == ["'a''b'", "E'a\\\\b'"]
    types = TypeRegistry()
    assert [format_type(oid, types, newest) for oid in (23, 1007, 18, 1184, 114, 1042, 22)] == [
        *("integer", "integer[]", '"char"', "timestamp with time zone", "json", "character", "int2vector")
    ]
    for named in (Type(70000, "pg_catalog", "int4"), Type(70000, "app", "_mood")):
        types.define(named.type_oid, named.namespace, named.name)
        with pytest.raises(SubscriberError, match="name of the type with OID 70000 is not known"):
            format_type(70000, types, newest)


def test_times() -> None:
    assert [timestamp(number) for number in (0, 1_500_000, -1)] == [
        *("2000-01-01 00:00:00+00", "2000-01-01 00:00:01.5+00", "1999-12-31 23:59:59.999999+00")
    ]
