"""``subscriber decode FILE``: convert captured bytes of pgoutput, or a recording, to text, one line for each message.

The output has the values of rows. An error has the place in the file, the message's tag and the offset, but no values. Everything before
the bad record is printed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, Final

from subscriber.cli.output import Output
from subscriber.consumer.captures import Record, records
from subscriber.consumer.message_lines import control_line, wire_line
from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.protocol.decoder import Decoder, decode
from subscriber.protocol.frames import XLogData, decode_frame, decode_status_update
from subscriber.protocol.messages import Relation
from subscriber.sinks.json_lines import json_line
from subscriber.sinks.output_lines import Line
from subscriber.sinks.text_lines import text_line

__all__ = ["add_arguments"]

_STATUS_UPDATE: Final = ord("r")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Print captured pgoutput messages, one per line. The input hex is what psql prints, a message per line; length is binary, with an"
        " Int32 length before each message; pg_recvlogical is its output; recording is of subscriber tail --record."
    )
    parser.add_argument("file", metavar="FILE", help="file with the captured messages; - for standard input")
    parser.add_argument("--format", choices=("json", "text"), default="text", help="default: %(default)s; json: one object per line")
    parser.add_argument(
        "--input",
        choices=("hex", "length", "pg_recvlogical", "recording"),
        help="hex: a message per line; length: an Int32 before each; default: detected from the first bytes",
    )
    parser.add_argument(
        "--frames", action="store_true", help="each record is the content of a CopyData message (w, k, r), not a bare pgoutput message"
    )
    parser.set_defaults(execute=execute)


async def execute(args: argparse.Namespace) -> int:
    """Print until the file ends."""
    if args.frames and args.input == "pg_recvlogical":
        raise ConfigurationError("pg_recvlogical writes messages without their frames", hint="omit --frames")
    # this verb only reads a file, so Ctrl-C need not wait for the event loop
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = Output()
    try:
        for line in _lines(args):
            await output.write(line)
    finally:
        await output.flush()
    return 0


def _lines(args: argparse.Namespace) -> Iterator[str]:
    written: Callable[[Line], str] = json_line if args.format == "json" else text_line
    capture = _Capture()
    name = "standard input" if args.file == "-" else args.file
    with nullcontext(sys.stdin.buffer) if args.file == "-" else _open(args.file) as file:
        place = ""
        try:
            for record in records(file, args.input, capture.check):
                place = record.place
                yield written(capture.line(record, frames=args.frames))
                place = ""
        except OSError as error:
            raise _unreadable(name, error) from error
        except SubscriberError as error:
            error.add_note(f"in {name}" + (f", {place}" if place else ""))
            raise


class _Capture:
    """The state of one capture: the decoder, and the relations described so far."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._relations: dict[int, Relation] = {}

    def check(self, data: bytes) -> object:
        """Raise a ProtocolError if this is not a whole message. Does not change the state."""
        return decode(data, in_stream=self._decoder.in_stream)

    def line(self, record: Record, *, frames: bool) -> Line:
        """Decode the next record. ``frames``: each is the content of a CopyData message, also outside of a recording."""
        line: Line
        if record.kind == "session":
            self._decoder = Decoder()
            line = {"kind": "session", **{name: str(value) for name, value in json.loads(record.data).items()}}
        else:
            line = self.frame(record) if frames or record.kind == "frame" else self.message(record.data)
        return line if record.seconds is None else line | {"seconds": f"{record.seconds:.6f}"}

    def message(self, payload: bytes) -> Line:
        """Decode the next message."""
        message = self._decoder.decode(payload)
        if isinstance(message, Relation):
            self._relations[message.relation_id] = message
        return wire_line(message, self._relations)

    def frame(self, record: Record) -> Line:
        """Decode the next content of a CopyData message."""
        if record.data[:1] == bytes([_STATUS_UPDATE]):
            return control_line(decode_status_update(record.data))
        frame = decode_frame(record.data)
        if not isinstance(frame, XLogData):
            return control_line(frame)
        return self.message(frame.payload) | {"wal_start": frame.start_lsn}


def _open(name: str) -> BinaryIO:
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(f'could not read "{name}": {error.strerror}', hint="give the path of a capture, or - for standard input")
