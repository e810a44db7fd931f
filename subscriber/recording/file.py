"""The file of a recording.

A recording begins with :data:`MAGIC`. Records follow: a header (kind, microseconds since the recording began, length, CRC32 of kind, time
and content), then the content. Integers have the most significant byte first. There are six kinds:

``S``
    A session begins: JSON with the publisher and the options of START_REPLICATION, see :class:`RecordedSession`. A recording has a further
    session for each time that the connection was lost and made again. Then the publisher sends again what was not confirmed.
``<``
    The content of a CopyData message that was received, header included.
``>``
    The content of a CopyData message that was sent: a standby status update.
``?``
    What the publisher answered about a streamed transaction whose end was received: JSON with its xid, and a list of the
    subtransactions that it has rolled back without sending the abort.
``M``, ``E``
    Only in a relay log (:mod:`subscriber.recording.relay_log`): messages of whole transactions, without the headers of their CopyData
    messages, as their number, their lengths and their bytes; and the LSN up to which everything is complete. Their time is that of the
    publisher's clock. They are read as the CopyData messages that they stand for; an LSN is a keepalive.

A record that is damaged or incomplete is an error. The records before it are valid, so the recording of a program that was killed can be
used up to its end.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from struct import Struct, pack, unpack_from
from struct import error as StructError
from typing import BinaryIO, Final, Protocol

from subscriber.errors import ConfigurationError, ProtocolError, SpoolError
from subscriber.protocol.frames import PrimaryKeepalive, XLogData, encode_frame
from subscriber.protocol.lsn import INVALID_LSN, Lsn

__all__ = [
    "ANSWERED",
    "END",
    "MAGIC",
    "MESSAGES",
    "RECEIVED",
    "SENT",
    "SESSION",
    "RecordedSession",
    "Recorder",
    "RecordingRecord",
    "encode_record",
    "end_lsn",
    "messages",
    "messages_content",
    "read_heads",
    "read_recording",
    "read_records",
]

MAGIC: Final = b"subscriber recording 1\n"
SESSION, RECEIVED, SENT, ANSWERED, MESSAGES, END = b"S", b"<", b">", b"?", b"M", b"E"
_HEADER: Final = Struct(">cqII")
_KINDS: Final = frozenset({SESSION, RECEIVED, SENT, ANSWERED, MESSAGES, END})
_LSN: Final = Struct(">Q")
_COUNT: Final = Struct(">I")
_MODE: Final = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    """What a replication session began with.

    Attributes:
        server_version: of the publisher, as ``server_version_num``.
        system_identifier: of the publisher.
        timeline: of the publisher.
        slot_name: the slot that was followed.
        start_lsn: everything up to there was confirmed before.
        options: the options of START_REPLICATION and their values.
        answered: whether the publisher's answers about streamed transactions are recorded; not by older versions of this program.
        relay_of: of a relay log, the subscription whose it is; None: a recording.
    """

    server_version: int
    system_identifier: str
    timeline: int
    slot_name: str
    start_lsn: Lsn
    options: dict[str, str]
    answered: bool = True
    relay_of: str | None = None

    def to_json(self) -> bytes:
        """As it is stored."""
        return json.dumps({**asdict(self), "start_lsn": str(self.start_lsn)}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> RecordedSession:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            given = json.loads(content)
            # other programs may store more
            fields = {"answered": False, **{name: given[name] for name in cls.__slots__ if name in given}}
            found = cls(**{**fields, "start_lsn": Lsn.parse(str(fields["start_lsn"])), "options": dict(fields["options"])})
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(str(error)) from None
        numbers = found.server_version, found.timeline
        texts = found.system_identifier, found.slot_name, found.relay_of or "", *found.options.values()
        if not all(isinstance(each, int) for each in numbers) or not all(isinstance(each, str) for each in texts):
            raise ValueError("a value has another type")
        return found


@dataclass(frozen=True, slots=True)
class RecordingRecord:
    """One record: its kind, its time in microseconds since the recording began, its content, and its place in the file for errors.

    ``end`` is the offset of the next record.
    """

    kind: bytes
    moment: int
    content: bytes
    place: str
    end: int = 0

    @property
    def seconds(self) -> float:
        """Its time in seconds."""
        return self.moment / 1_000_000


class Recorder:
    """Writes a recording. The file must not exist yet; only its owner may read it, because it has the values of rows.

    Args:
        path: of the file.

    Raises:
        ConfigurationError: the file exists, or cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except OSError as error:
            hint = "name another file, or remove this one" if isinstance(error, FileExistsError) else "name a file that can be created"
            raise ConfigurationError(f'could not create "{path}": {error.strerror}', hint=hint) from error
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._began = time.monotonic()
        self._write(MAGIC)
        self._sync_name()

    def session(self, session: RecordedSession) -> None:
        """Note that a session begins."""
        self._record(SESSION, session.to_json())

    def received(self, frames: Sequence[bytes]) -> None:
        """Store received messages."""
        for frame in frames:
            self._record(RECEIVED, frame)

    def sent(self, frame: bytes) -> None:
        """Store a message that is sent next.

        Raises:
            SpoolError: the file cannot be written. Do not send the message.
        """
        self._record(SENT, frame)

    def answered(self, xid: int, rolled_back: Collection[int]) -> None:
        """Store which subtransactions of a streamed transaction the publisher has rolled back."""
        self._record(ANSWERED, json.dumps([xid, sorted(rolled_back)]).encode())

    def sync(self) -> None:
        """Wait until everything that was stored is on disk.

        Raises:
            SpoolError: the file cannot be written. Do not send what was stored last.
        """
        try:
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the file.

        Raises:
            SpoolError: its end cannot be written.
        """
        try:
            self._file.close()
        except OSError as error:
            raise self._failed(error) from error

    def _record(self, kind: bytes, content: bytes) -> None:
        moment = int((time.monotonic() - self._began) * 1_000_000)
        self._write(encode_record(kind, moment, content))

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._failed(error) from error

    def _sync_name(self) -> None:
        """A new file survives a crash of the machine once its directory is on disk."""
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            os.close(descriptor)

    def _failed(self, error: OSError) -> SpoolError:
        return SpoolError(
            f'could not write the recording "{self._path}": {error.strerror}', hint="make room; the slot resumes at the last confirmed LSN"
        )


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def encode_record(kind: bytes, moment: int, content: bytes) -> bytes:
    """Return a record as it is stored."""
    return _HEADER.pack(kind, moment, len(content), _checksum(kind, moment, content)) + content


def messages_content(payloads: Sequence[bytes]) -> bytes:
    """The content of a record of messages."""
    return pack(f">{len(payloads) + 1}I", len(payloads), *map(len, payloads)) + b"".join(payloads)


def messages(record: RecordingRecord) -> list[bytes]:
    """The messages of a record.

    Raises:
        ProtocolError: it has none.
    """
    content, found = record.content, list[bytes]()
    try:
        (count,) = _COUNT.unpack_from(content)
        place = 4 * (count + 1)
        for length in unpack_from(f">{count}I", content, 4):
            found.append(content[place : place + length])
            place += length
    except StructError:
        place = -1
    if place != len(content):
        raise ProtocolError(f"{record.place} of the recording is damaged: its lengths do not match")
    return found


def end_lsn(record: RecordingRecord) -> Lsn:
    """The LSN of a record up to which everything is complete.

    Raises:
        ProtocolError: it has none.
    """
    if len(record.content) != _LSN.size:
        raise ProtocolError(f"{record.place} of the recording is damaged: it is not an LSN")
    return Lsn(*_LSN.unpack(record.content))


def read_recording(file: _Readable) -> Iterator[RecordingRecord]:
    """Read the records of a recording one by one, those of a relay log as the messages that they stand for.

    Args:
        file: opened in binary mode.

    Raises:
        ConfigurationError: the file is not a recording.
        ProtocolError: a record is damaged, or the file ends within it.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise ConfigurationError("the file is not a recording", hint="`subscriber tail --record FILE` writes one")
    for record in read_records(file, len(MAGIC)):
        if record.kind == MESSAGES:
            for payload in messages(record):
                frame = encode_frame(XLogData(INVALID_LSN, INVALID_LSN, record.moment, payload))
                yield RecordingRecord(RECEIVED, record.moment, frame, record.place)
        elif record.kind == END:
            frame = encode_frame(PrimaryKeepalive(end_lsn(record), record.moment, reply_requested=False))
            yield RecordingRecord(RECEIVED, record.moment, frame, record.place)
        else:
            yield record


def read_records(file: _Readable, position: int) -> Iterator[RecordingRecord]:
    """Read records from an offset on, at which the file is.

    Raises:
        ProtocolError: a record is damaged, or the file ends within it.
    """
    number = 0
    while head := file.read(_HEADER.size):
        number += 1
        place = f"record {number} at byte {position}"
        if len(head) < _HEADER.size:
            raise _truncated(place)
        kind, moment, size, checksum = _HEADER.unpack(head)
        if kind not in _KINDS:
            raise ProtocolError(f"{place} of the recording is damaged: its kind is not known")
        content = file.read(size)
        if len(content) < size:
            raise _truncated(place)
        if _checksum(kind, moment, content) != checksum:
            raise ProtocolError(f"{place} of the recording is damaged: its checksum does not match")
        position += _HEADER.size + size
        yield RecordingRecord(kind, moment, content, place, position)


def read_heads(file: BinaryIO, position: int, size: int) -> Iterator[tuple[bytes, int, int, int]]:
    """Read the heads of records from an offset up to a size. Their contents are not read, and not checked.

    Returns:
        For each record: its kind, its offset, the offset of the next record, and how many messages it has.

    Raises:
        ProtocolError: one is damaged, or the file ends within it.
    """
    while position < size:
        file.seek(position)
        head = file.read(_HEADER.size + _COUNT.size)
        place = f"the record at byte {position}"
        if len(head) < _HEADER.size + _COUNT.size:
            raise _truncated(place)
        kind, _, length, _ = _HEADER.unpack_from(head)
        stop = position + _HEADER.size + length
        if kind not in _KINDS:
            raise ProtocolError(f"{place} of the recording is damaged: its kind is not known")
        if stop > size:
            raise _truncated(place)
        yield kind, position, stop, _COUNT.unpack_from(head, _HEADER.size)[0]
        position = stop


def _truncated(place: str) -> ProtocolError:
    error = ProtocolError(f"the recording ends within {place}")
    error.hint = "everything before it was read; the program that recorded was killed"
    return error


def _checksum(kind: bytes, moment: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(kind + moment.to_bytes(8, signed=True)))
