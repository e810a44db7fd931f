"""Deletion vectors: the deleted rows of a table's file, by position, so that a change of a few rows does not rewrite the file.

A vector is a Roaring bitmap in a file of the table's directory ``_dv``. Programs that clean up a table's directory ignore names that begin
with an underscore; ``retention.py`` removes the files of vectors that are not needed. Small vectors could be part of the commit, but then
Delta's VACUUM fails (``MatchError``, 4.4.0). They are read, because other programs and earlier versions of this one write them.

Source: Delta protocol, Deletion Vectors (descriptor, storage, format).
"""

from __future__ import annotations

import struct
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa
from pyroaring import BitMap

from subscriber.errors import TargetError
from subscriber.sinks.spark.files.file_errors import DamagedFile
from subscriber.sinks.spark.files.storage import Storage

__all__ = ["VECTORS", "DeletionVector", "live_rows", "read_vector", "write_vectors"]

VECTORS: Final = "_dv"
"""Directory for the files of vectors, in the table's directory."""
_FORMAT: Final = b"\x01"
_MAGIC: Final = 1681511377
_UUID_CHARACTERS: Final = 20
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


@dataclass(frozen=True, slots=True)
class DeletionVector:
    """Where a vector is stored: Delta's descriptor.

    ``kind`` is ``i``: ``text`` is the vector, in Z85; ``u``: a file of the table; ``p``: a file with an absolute path.
    """

    kind: str
    text: str
    size: int
    deleted: int
    offset: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the descriptor in an action."""
        return cls(data["storageType"], data["pathOrInlineDv"], data["sizeInBytes"], data["cardinality"], data.get("offset"))

    def to_json(self) -> dict[str, Any]:
        """Convert to the descriptor in an action."""
        found: dict[str, Any] = {"storageType": self.kind, "pathOrInlineDv": self.text}
        if self.offset is not None:
            found["offset"] = self.offset
        return {**found, "sizeInBytes": self.size, "cardinality": self.deleted}

    @property
    def file(self) -> str | None:
        """Path of its file, relative to the table. None if there is no such file."""
        if self.kind != "u":
            return None
        prefix, number = self.text[:-_UUID_CHARACTERS], self.text[-_UUID_CHARACTERS:]
        name = f"deletion_vector_{uuid.UUID(bytes=_decoded(number))}.bin"
        return f"{prefix}/{name}" if prefix else name


def read_vector(storage: Storage, directory: str, vector: DeletionVector) -> BitMap:
    """The positions of the deleted rows of a file of the table in a directory."""
    if vector.kind == "i":
        return _bitmap(_decoded(vector.text)[: vector.size], storage, directory)
    if vector.file is None:
        raise TargetError(
            f"a deletion vector of {storage.what(directory)} is outside of the table", hint="rewrite the table: REORG TABLE … APPLY (PURGE)"
        )
    path = f"{directory}/{vector.file}"
    with storage.reading(path), storage.filesystem.open_input_file(path) as file:
        start = vector.offset or 0
        content = bytes(file.read_at(vector.size + 8, start))
    data = content[4 : 4 + vector.size]
    if len(content) != vector.size + 8 or struct.unpack(">iI", content[:4] + content[-4:]) != (vector.size, zlib.crc32(data)):
        raise DamagedFile(storage.what(path), path)
    return _bitmap(data, storage, path)


def _bitmap(data: bytes, storage: Storage, path: str) -> BitMap:
    """Read the portable 64-bit format. A file has fewer than 2**32 rows, so there is at most one 32-bit bitmap, of the lowest positions."""
    try:
        magic, count = struct.unpack_from("<iq", data)
        if magic != _MAGIC or count > 1 or (count and struct.unpack_from("<I", data, 12) != (0,)):
            raise ValueError(magic)
        return BitMap.deserialize(data[16:]) if count else BitMap()
    except (ValueError, struct.error) as error:
        raise DamagedFile(storage.what(path), path) from error


def write_vectors(storage: Storage, directory: str, vectors: Mapping[str, BitMap]) -> dict[str, DeletionVector]:
    """Store vectors, durably, in one file. They are given by the path of the file that they belong to."""
    found: dict[str, DeletionVector] = {}
    number, content = uuid.uuid4(), bytearray(_FORMAT)
    for path, rows in vectors.items():
        rows.run_optimize()
        data = struct.pack("<iqI", _MAGIC, 1, 0) + rows.serialize()
        found[path] = DeletionVector("u", VECTORS + _encoded(number.bytes), len(data), len(rows), len(content))
        content += struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    if vectors:
        storage.make_directory(f"{directory}/{VECTORS}")
        storage.write(f"{directory}/{VECTORS}/deletion_vector_{number}.bin", bytes(content))
    return found


def live_rows(deleted: BitMap, count: int) -> pa.Array:
    """The positions of the rows that are not deleted, in a file with ``count`` rows."""
    found = deleted.flip(0, count).to_array()
    return pa.Array.from_buffers(pa.uint32(), len(found), [None, pa.py_buffer(found)])


def _encoded(data: bytes) -> str:
    """Encode in Z85, padded with zeros to a multiple of four bytes."""
    found: list[str] = []
    for start in range(0, len(data), 4):
        value = int.from_bytes(data[start : start + 4].ljust(4, b"\0"), "big")
        found += [_DIGITS[value // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(found)


def _decoded(text: str) -> bytes:
    values = [_DIGITS.index(character) for character in text]
    parts = (values[start : start + 5] for start in range(0, len(values), 5))
    return b"".join(sum(digit * 85 ** (4 - place) for place, digit in enumerate(part)).to_bytes(4, "big") for part in parts)
