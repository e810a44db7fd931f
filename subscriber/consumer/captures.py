r"""Files of captured messages: find the bytes of each record.

``hex``
    Text with one record a line, in hexadecimal, with or without a leading ``\x``. Empty lines and lines that begin with ``#`` are skipped.
    psql's output of ``pg_logical_slot_peek_binary_changes``, aligned or not, works too: the last column is used, headings and the row
    count are skipped.
``length``
    Binary. Each record follows its length (Int32, the most significant byte first).
``pg_recvlogical``
    The output of that program with the plugin pgoutput: each record is followed by a line feed. A record may also contain line feeds. But
    a message determines its own end, so the record ends at the first line feed before which the bytes are a whole message.
``recording``
    A recording of ``subscriber tail --record`` (``recording/file.py``). Its records are the contents of CopyData messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, Literal

from subscriber.errors import ConfigurationError, ProtocolError
from subscriber.recording.file import ANSWERED, MAGIC, SESSION, read_recording

__all__ = ["CaptureForm", "Record", "records"]

CaptureForm = Literal["hex", "length", "pg_recvlogical", "recording"]

_HEAD: Final = 16
_FIELDS: Final = re.compile(rb"[|\t,]")
_HEXADECIMAL: Final = re.compile(rb"(?:\\{1,2}x)?((?:[0-9A-Fa-f]{2})*)")
_DECORATION: Final = re.compile(rb"\(\d+ rows?\)|[-+ ]+|(?:.*[|\t, ])?data", re.IGNORECASE)
_INCOMPLETE: Final = ("message ends before its last field", "string without its terminating null")


@dataclass(frozen=True, slots=True)
class Record:
    """One captured message and its place: ``line 7``, or ``record 7 at byte 1234``.

    ``kind`` and ``seconds`` are of recordings: ``frame`` is the content of a CopyData message, ``session`` describes one as JSON.
    """

    place: str
    data: bytes
    kind: Literal["message", "frame", "session"] = "message"
    seconds: float | None = None


class _Source:
    """A binary file whose first bytes were already read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._head = file.read(_HEAD)

    def guess(self) -> CaptureForm:
        """Guess the form.

        A recording names itself. Text has no null bytes. A length below 16 MB begins with one. A first message has one after its tag.
        """
        if MAGIC.startswith(self._head) and len(self._head) == _HEAD:
            return "recording"
        if b"\0" not in self._head:
            return "hex"
        return "length" if self._head[0] == 0 else "pg_recvlogical"

    def read(self, size: int) -> bytes:
        """Read this many bytes. The result is shorter only at the end of the file."""
        taken, self._head = self._head[:size], self._head[size:]
        return taken if len(taken) == size else taken + self._file.read(size - len(taken))

    def readline(self) -> bytes:
        """Read up to the next line feed, inclusive."""
        end = self._head.find(b"\n") + 1
        if end:
            return self.read(end)
        taken, self._head = self._head, b""
        return taken + self._file.readline()


def records(file: BinaryIO, form: CaptureForm | None, whole: Callable[[bytes], object]) -> Iterator[Record]:
    """Read the records of a file one by one.

    Args:
        file: opened in binary mode.
        form: None: guess it from the first bytes.
        whole: raises ProtocolError if the bytes are not one whole record. Called only for ``pg_recvlogical``.

    Raises:
        ConfigurationError: a line is not hexadecimal.
        ProtocolError: the file ends within a record.
    """
    source = _Source(file)
    match form or source.guess():
        case "hex":
            return _hexadecimal(source)
        case "length":
            return _length_prefixed(source)
        case "pg_recvlogical":
            return _line_feeds(source, whole)
        case "recording":
            return _recorded(source)


def _hexadecimal(source: _Source) -> Iterator[Record]:
    number = 0
    while line := source.readline():
        number += 1
        text = line.strip()
        if not text or text.startswith(b"#") or _DECORATION.fullmatch(text):
            continue
        match = _HEXADECIMAL.fullmatch(_FIELDS.split(text)[-1].strip(b' "'))
        if match is None:
            raise ConfigurationError(
                f"line {number} is not hexadecimal",
                hint="give one message per line, as in 42000000… or \\x42000000…; --input selects the other formats",
            )
        yield Record(f"line {number}", bytes.fromhex(match[1].decode("ascii")))


def _length_prefixed(source: _Source) -> Iterator[Record]:
    number = position = 0
    while prefix := source.read(4):
        number += 1
        place = f"record {number} at byte {position}"
        size = int.from_bytes(prefix)
        data = source.read(size)
        if len(prefix) < 4 or len(data) < size:
            raise ProtocolError(f"the file ends within {place}")
        position += 4 + size
        yield Record(place, data)


def _recorded(source: _Source) -> Iterator[Record]:
    for record in read_recording(source):
        if record.kind != ANSWERED:
            yield Record(record.place, record.content, "session" if record.kind == SESSION else "frame", record.seconds)


def _line_feeds(source: _Source, whole: Callable[[bytes], object]) -> Iterator[Record]:
    number = position = 0
    data = b""
    while line := source.readline():
        data += line
        record = data.removesuffix(b"\n")
        try:
            whole(record)
        except ProtocolError as error:
            if str(error).startswith(_INCOMPLETE):
                continue
        number += 1
        yield Record(f"record {number} at byte {position}", record)
        position += len(data)
        data = b""
    if data:
        raise ProtocolError(f"the file ends within record {number + 1} at byte {position}")
