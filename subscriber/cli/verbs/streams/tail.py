"""``subscriber tail``: print committed changes on standard output, as text or as JSON lines.

A transaction is acknowledged after it is written and flushed. So with ``--slot``, printed transactions are not printed again, unless the
program or the connection ended between the two. Without ``--slot`` a temporary slot is used: it prints what is committed from now on, and
nothing remains on the publisher.

With ``--record``, the raw stream is stored as well, with timing and feedback, for ``decode`` and ``replay``.

With ``--plugin``, an output plugin writes the lines. Its records are written as ``pg_recvlogical`` does, each with a line feed.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from subscriber.cli.options import add_publisher_arguments, add_settings_argument, lsn
from subscriber.cli.output import Output
from subscriber.cli.signals import clean_end
from subscriber.config import Settings, SubscriptionOptions
from subscriber.consumer.plugin_stream import PluginStream
from subscriber.consumer.received import ReceivedMessage, ReceivedTransaction
from subscriber.consumer.transactions import TransactionStream, transactions
from subscriber.plugins.registry import BUILTIN
from subscriber.recording.file import Recorder
from subscriber.sinks.json_lines import JsonLines
from subscriber.sinks.output_lines import ChangeFormat
from subscriber.sinks.text_lines import TextLines

__all__ = ["add_arguments"]

_FORMATS: Final[Mapping[str, ChangeFormat]] = {"text": TextLines(), "json": JsonLines()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = "Print the committed changes of a publication as they arrive."
    add_publisher_arguments(parser)
    parser.add_argument(
        "--slot", metavar="NAME", help="a permanent slot, created if missing; tail resumes from its position; default: a temporary slot"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--format", choices=sorted(_FORMATS), default="text", help="default: %(default)s; json: one object per line")
    form.add_argument("--plugin", metavar="NAME", help=f"an output plugin: {', '.join(sorted(BUILTIN))}, or package.module:Class")
    parser.add_argument(
        "-p", dest="plugin_options", action="append", default=[], metavar="name[=value]", help="an option of the plugin; may be repeated"
    )
    parser.add_argument("--messages", action="store_true", help="print logical messages (pg_logical_emit_message) too")
    parser.add_argument("--record", type=Path, metavar="FILE", help="store the raw stream in a new file, for decode and replay")
    until = parser.add_mutually_exclusive_group()
    until.add_argument("--until-caught-up", action="store_true", help="end when everything that is committed at the start is printed")
    until.add_argument("--until-lsn", type=lsn, metavar="LSN", help="end when everything that is committed up to this LSN is printed")
    add_settings_argument(parser)
    parser.set_defaults(execute=execute, usage=parser.error)


async def execute(args: argparse.Namespace) -> int:
    """Print until stopped, or until the requested end."""
    if args.plugin is None and args.plugin_options:
        args.usage("-p needs --plugin")
    with _recorder(args) as recorder:
        return await _tail(args, recorder)


@contextlib.contextmanager
def _recorder(args: argparse.Namespace) -> Iterator[Recorder | None]:
    if args.record is None:
        yield None
        return
    with contextlib.closing(Recorder(args.record)) as recorder:
        yield recorder


async def _tail(args: argparse.Namespace, recorder: Recorder | None) -> int:
    options = SubscriptionOptions.parse(args.options)
    if args.plugin is None:
        stream = _stream(args, recorder, options, messages=args.messages)
        with clean_end(stream.stop) as ending:
            await _print(stream, _FORMATS[args.format], Output())
        return ending.status
    given = (text.partition("=") for text in args.plugin_options)
    plugin_options = {name: value if equals else None for name, equals, value in given}
    async with await PluginStream.open(args.connection, args.plugin, plugin_options, options) as plugin:
        stream = _stream(args, recorder, plugin.options, messages=plugin.messages, blocks=plugin.streaming)
        with clean_end(stream.stop) as ending:
            await _print_plugin(stream, plugin, Output("surrogateescape"))
    return ending.status


def _stream(
    args: argparse.Namespace, recorder: Recorder | None, options: SubscriptionOptions, *, messages: bool, blocks: bool = False
) -> TransactionStream[ReceivedTransaction | ReceivedMessage]:
    return transactions(
        args.connection,
        publications=args.publication,
        slot_name=args.slot,
        options=options,
        settings=Settings.parse(args.settings),
        until_lsn=args.until_lsn,
        until_caught_up=args.until_caught_up,
        messages=messages,
        recorder=recorder,
        blocks=blocks,
    )


async def _print_plugin(stream: TransactionStream[ReceivedTransaction | ReceivedMessage], plugin: PluginStream, output: Output) -> None:
    async with stream:
        async for received in stream:
            async for records in plugin.records(received):
                for record in records:
                    await output.write(record.data.decode("utf-8", "surrogateescape"))
            await output.flush()
            await plugin.acknowledge(received)


async def _print(stream: TransactionStream[ReceivedTransaction | ReceivedMessage], lines: ChangeFormat, output: Output) -> None:
    async with stream:
        async for received in stream:
            if isinstance(received, ReceivedMessage):
                await output.write(lines.message(received.lsn, received.prefix, received.content))
            else:
                await _print_transaction(received, lines, output)
            await output.flush()
            await received.acknowledge()


async def _print_transaction(transaction: ReceivedTransaction, lines: ChangeFormat, output: Output) -> None:
    opening = lines.opening(transaction.header)
    if opening is not None:
        await output.write(opening)
    async for change in transaction:
        await output.write(lines.change(transaction.header, change))
    await output.write(lines.closing(transaction.header))
