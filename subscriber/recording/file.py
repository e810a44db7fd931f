"""The file of a recording.

A recording begins with :data:`MAGIC`. Records follow: a header (kind, microseconds since the recording began, length, CRC32 of kind, time
and content), then the content. Integers have the most significant byte first. There are four kinds:

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
from struct import Struct
from typing import BinaryIO, Final, Protocol

from subscriber.errors import ConfigurationError, ProtocolError, SpoolError
from subscriber.protocol.lsn import Lsn

__all__ = ["ANSWERED", "MAGIC", "RECEIVED", "SENT", "SESSION", "RecordedSession", "Recorder", "RecordingRecord", "read_recording"]

MAGIC: Final = b"subscriber recording 1\n"
SESSION, RECEIVED, SENT, ANSWERED = b"S", b"<", b">", b"?"
_HEADER: Final = Struct(">cqII")
_KINDS: Final = frozenset({SESSION, RECEIVED, SENT, ANSWERED})
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
    """

    server_version: int
    system_identifier: str
    timeline: int
    slot_name: str
    start_lsn: Lsn
    options: dict[str, str]
    answered: bool = True

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
        numbers, texts = (found.server_version, found.timeline), (found.system_identifier, found.slot_name, *found.options.values())
        if not all(isinstance(each, int) for each in numbers) or not all(isinstance(each, str) for each in texts):
            raise ValueError("a value has another type")
        return found


@dataclass(frozen=True, slots=True)
class RecordingRecord:
    """One record: its kind, its time in seconds since the recording began, its content, and its place in the file for errors."""

    kind: bytes
    seconds: float
    content: bytes
    place: str


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
        self._write(_HEADER.pack(kind, moment, len(content), _checksum(kind, moment, content)) + content)

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


def read_recording(file: _Readable) -> Iterator[RecordingRecord]:
    """Read the records of a recording one by one.

    Args:
        file: opened in binary mode.

    Raises:
        ConfigurationError: the file is not a recording.
        ProtocolError: a record is damaged, or the file ends within it.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise ConfigurationError("the file is not a recording", hint="`subscriber tail --record FILE` writes one")
    number, position = 0, len(MAGIC)
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
        yield RecordingRecord(kind, moment / 1_000_000, content, place)


def _truncated(place: str) -> ProtocolError:
    error = ProtocolError(f"the recording ends within {place}")
    error.hint = "everything before it was read; the program that recorded was killed"
    return error


def _checksum(kind: bytes, moment: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(kind + moment.to_bytes(8, signed=True)))
