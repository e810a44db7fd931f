"""Manifests: the content of a landed batch, and the chain of batches.

A manifest says which LSNs its batch covers: after ``begin``, up to ``end``. ``previous`` is the ``end`` of the previous manifest in the
same directory. So missing and duplicate manifests are detected. ``begin`` may be after ``previous``: then the position moved in between,
and there was nothing to land.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from subscriber.errors import DataLossError, TargetError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.files.documents import parse_document
from subscriber.sinks.spark.files.file_errors import DamagedFile
from subscriber.sinks.spark.files.location import inside
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.schema.table_schema import TableSchema

__all__ = [
    "EPOCH_MICROSECONDS",
    "EPOCH_OFFSET",
    "BatchTransactions",
    "LandedFile",
    "Manifest",
    "ManifestsRead",
    "check_chain",
    "check_files",
    "clock",
    "first_manifest",
    "manifest_ends",
    "manifest_name",
    "read_manifests",
]

EPOCH_OFFSET: Final = 946_684_800
"""Seconds from 1970 to 2000."""
EPOCH_MICROSECONDS: Final = EPOCH_OFFSET * 1_000_000
_NAME: Final = re.compile(r"(\d{20})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedFile:
    """A file with rows of one table, which is given by its number in the lake. The path is relative to the lake, the size in bytes."""

    table_id: int
    path: str
    rows: int
    size: int
    schema: TableSchema

    def to_json(self) -> dict[str, Any]:
        return {"id": self.table_id, "path": self.path, "rows": self.rows, "size": self.size, "schema": self.schema.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], schemas: MutableMapping[str, TableSchema] | None = None) -> LandedFile:
        """Read it from JSON. ``schemas`` is a cache of the schemas that were read before, by their text."""
        known, text = schemas if schemas is not None else {}, repr(data["schema"])
        schema = known.get(text)
        if schema is None:
            schema = known[text] = TableSchema.from_json(data["schema"])
        return cls(table_id=data["id"], path=inside(data["path"]), rows=data["rows"], size=data["size"], schema=schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTransactions:
    """What a manifest says of the transactions of its batch. Times are in microseconds since 2000.

    Attributes:
        transactions: a count.
        commit_time, first_commit_time: of the last and the first transaction, by the publisher's clock.
        received_time: when the first transaction was received, by the subscriber's clock.
    """

    transactions: int = 0
    commit_time: int | None = None
    first_commit_time: int | None = None
    received_time: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(BatchTransactions):
    """A manifest, see the module. ``landed_time``: when it was written, by the subscriber's clock, in microseconds since 2000."""

    previous: Lsn
    begin: Lsn
    end: Lsn
    landed_time: int | None = None
    files: tuple[LandedFile, ...] = field(default=())

    @property
    def since(self) -> float | None:
        """When its first transaction was committed, else when it was landed, in seconds since 1970. A commit is not after the landing."""
        times = [time for time in (self.first_commit_time or self.commit_time, self.landed_time) if time]
        return min(times) / 1e6 + EPOCH_OFFSET if times else None

    @property
    def gathering(self) -> float:
        """Seconds from the receipt of its first transaction until it was landed. 0 if unknown."""
        if self.received_time is None or self.landed_time is None:
            return 0.0
        return max(self.landed_time - self.received_time, 0) / 1e6

    @property
    def until(self) -> float | None:
        """When its last transaction was committed, in seconds since 1970."""
        return self.commit_time / 1e6 + EPOCH_OFFSET if self.commit_time else None

    def after_commit(self, moment: int | None) -> float | None:
        """Seconds from the first commit to one of the manifest's times."""
        return None if moment is None or self.since is None else max(moment / 1e6 + EPOCH_OFFSET - self.since, 0.0)

    @property
    def size(self) -> int:
        """Of all files, in bytes."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        return {
            "previous": str(self.previous),
            "begin": str(self.begin),
            "end": str(self.end),
            "transactions": self.transactions,
            "commit_time": self.commit_time,
            "first_commit_time": self.first_commit_time,
            "received_time": self.received_time,
            "landed_time": self.landed_time,
            "files": [file.to_json() for file in self.files],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], schemas: MutableMapping[str, TableSchema] | None = None) -> Manifest:
        """Read it from JSON. ``schemas`` is as in :meth:`LandedFile.from_json`."""
        return cls(
            previous=Lsn.parse(data["previous"]),
            begin=Lsn.parse(data["begin"]),
            end=Lsn.parse(data["end"]),
            transactions=data["transactions"],
            commit_time=data["commit_time"],
            first_commit_time=data.get("first_commit_time"),
            received_time=data.get("received_time"),
            landed_time=data.get("landed_time"),
            files=tuple(LandedFile.from_json(file, schemas) for file in data["files"]),
        )


@dataclass(slots=True)
class ManifestsRead:
    """A cache of one directory's manifests by their ends, for repeated reads; and of the schemas in them, by their text."""

    manifests: dict[int, Manifest] = field(default_factory=dict)
    schemas: dict[str, TableSchema] = field(default_factory=dict)


def clock() -> int:
    """The time of this computer, in microseconds since 2000."""
    return int((time.time() - EPOCH_OFFSET) * 1e6)


def manifest_name(directory: str, end: Lsn) -> str:
    """The path of the manifest that ends at an LSN."""
    return f"{directory}/{int(end):020d}.json"


def read_manifests(
    storage: Storage,
    directory: str,
    after: Lsn = INVALID_LSN,
    anchor: Lsn | None = None,
    *,
    read: ManifestsRead | None = None,
    until: Lsn | None = None,
) -> list[Manifest]:
    """Read the manifests of a directory that end after an LSN and not after ``until``, in order, and check their chain.

    ``anchor`` is the end of the manifest before the first one, if it is known. ``read`` is a cache.

    Raises:
        DataLossError: a manifest is missing.
    """
    read = read if read is not None else ManifestsRead()
    seen: set[str] = set()
    while True:
        found = _read_all(storage, directory, after, until, read)
        if found is None:
            continue  # the applier removed some in the meantime; it never removes the last one
        if _is_whole(found, storage.what(directory), anchor, seen):
            return found


def _is_whole(manifests: Sequence[Manifest], place: str, anchor: Lsn | None, seen: set[str]) -> bool:
    """Check the chain. False: a manifest is missing, for the first time.

    A listing may miss a file that was created during the listing, and still have a later one. The next listing has both.
    """
    try:
        check_chain(manifests, place, anchor)
    except DataLossError as gap:
        if str(gap) in seen:
            raise
        seen.add(str(gap))
        return False
    return True


def _read_all(storage: Storage, directory: str, after: Lsn, until: Lsn | None, read: ManifestsRead) -> list[Manifest] | None:
    found: dict[int, Manifest] = {}
    ends = manifest_ends(storage, directory)
    for end in ends:
        if end > after and (until is None or end <= until):
            manifest = read.manifests.get(end) or _read(storage, manifest_name(directory, Lsn(end)), end, read.schemas)
            if manifest is None:
                return None
            found[end] = manifest
    there = {*ends}
    read.manifests = {end: manifest for end, manifest in (read.manifests | found).items() if end in there}
    return list(found.values())


def _read(storage: Storage, path: str, end: int, schemas: MutableMapping[str, TableSchema]) -> Manifest | None:
    def parsed(document: dict[str, Any]) -> Manifest:
        manifest = Manifest.from_json(document, schemas)
        if int(manifest.end) != end:
            raise ValueError
        return manifest

    return parse_document(storage, path, parsed)


def manifest_ends(storage: Storage, directory: str) -> list[int]:
    """The ends of a directory's manifests, taken from their names, in order."""
    return [int(match[1]) for file in storage.files(directory) if (match := _NAME.fullmatch(file.name))]


def first_manifest(storage: Storage, directory: str, after: Lsn) -> Manifest | None:
    """The first manifest that ends after an LSN, if its predecessor does not. None if there is none. Reads no other manifest.

    Raises:
        DataLossError: a manifest before it is missing.
    """
    seen: set[str] = set()
    while True:
        end = next((end for end in manifest_ends(storage, directory) if end > after), None)
        if end is None:
            return None
        found = _read(storage, manifest_name(directory, Lsn(end)), end, {})
        # an earlier predecessor was removed
        if found is not None and (found.previous < after or _is_whole([found], storage.what(directory), after, seen)):
            return found


def check_files(storage: Storage, directory: str, files: Iterable[LandedFile]) -> None:
    """Check that files of one directory exist and are complete, or raise DamagedFile."""
    sizes = {f"{directory}/{file.name}": file.size for file in storage.files(directory)}
    for file in files:
        size, what = sizes.get(file.path), f"landed file {storage.what(file.path)}"
        if size is None:
            raise DamagedFile(what, file.path, "is missing")
        if size != file.size:
            raise DamagedFile(what, file.path, f"has {size} bytes, not {file.size}")


def check_chain(manifests: Sequence[Manifest], place: str, anchor: Lsn | None = None) -> None:
    """Check that each manifest follows the previous one. ``anchor``: the end of the manifest before the first one. None: unknown.

    Raises:
        DataLossError: a manifest is missing.
        TargetError: a manifest overlaps the previous one, or is inconsistent.
    """
    previous = anchor
    for manifest in manifests:
        if previous is not None and manifest.previous != previous:
            if manifest.previous > previous:
                raise DataLossError(
                    f"landing zone {place} has a gap: no manifest from {previous} to {manifest.previous}",
                    hint="restore the missing files from a backup, or start over in a new directory",
                )
            raise TargetError(
                f"landing zone {place}: the batch that ends at {manifest.end} overlaps the one before", hint="another program wrote there"
            )
        if not manifest.previous <= manifest.begin <= manifest.end:
            raise TargetError(
                f"landing zone {place}: the batch that ends at {manifest.end} is inconsistent", hint="another program wrote there"
            )
        previous = manifest.end
