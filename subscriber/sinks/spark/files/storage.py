"""Files of a lake: written completely and durably, or not at all.

On a local file system, a file is written under another name, fsynced and renamed. It is durable once its directory is fsynced too
(:meth:`Storage.sync`). In an object store, a file appears as a whole when it is closed; nothing is renamed. In both cases readers follow a
manifest, which is written last. Files that no manifest names are ignored.

Names are relative to the lake, with slashes.

Where a file cannot be read or written, all modules of the lake raise :class:`TargetError`, or :class:`TargetUnavailable` if a retry may
succeed (``file_errors.py``). So their descriptions name other errors only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Self
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from subscriber.errors import ConfigurationError
from subscriber.sinks.spark.files.file_errors import DamagedFile, os_errors
from subscriber.sinks.spark.files.location import Location, inside

__all__ = ["TEMPORARY", "PendingFile", "Storage", "StoredFile"]

TEMPORARY: Final = ".tmp-"
"""Prefix of the names of files that are being written."""

_READS: Final = 10
"""How often to read an object that is replaced during each read."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An existing file. ``changed`` is its modification time in seconds since 1970."""

    name: str
    size: int
    changed: float = 0.0


class PendingFile:
    """A file that is being written. It exists after :meth:`commit`, and is durable after :meth:`Storage.sync` of its directory."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = name
        self._storage = storage
        path = PurePosixPath(name)
        self._written = str(path.with_name(f"{TEMPORARY}{uuid4().hex}-{path.name}")) if storage.root else name
        self.stream = storage.filesystem.open_output_stream(self._written)

    def commit(self, name: str | None = None) -> int:
        """Close the file under its name, or under another one in the same directory. Return its size in bytes."""
        final = name or self.name
        size = int(self.stream.tell())
        self.stream.close()
        if self._storage.root is not None:
            written = self._storage.root / self._written
            _fsync(written)
            written.rename(self._storage.root / final)
        elif final != self._written:
            self._storage.filesystem.move(self._written, final)
        self.name = final
        return size

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.close()
        with contextlib.suppress(OSError):
            self._storage.filesystem.delete_file(self._written)


class Storage:
    """The files of one lake, see the module. ``root`` is its directory, None in an object store; ``place`` is its name in errors."""

    def __init__(self, filesystem: fs.FileSystem, root: Path | None, place: str) -> None:
        self.filesystem = filesystem
        self.root = root
        self.place = place

    @classmethod
    def open(cls, location: Location) -> Self:
        """Open the location. Nothing is created.

        Raises:
            ConfigurationError: pyarrow does not support such a file system.
        """
        if location.path is not None:
            local = fs.LocalFileSystem()
            return cls(fs.SubTreeFileSystem(location.path, local), Path(location.path), location.path)
        assert location.uri is not None
        try:
            with os_errors(f"lake {location}"):
                filesystem, path = fs.FileSystem.from_uri(location.uri)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
            raise ConfigurationError(
                f"there is no file system for {location}", hint="pyarrow supports s3, gs, abfs, hdfs and file"
            ) from error
        return cls(fs.SubTreeFileSystem(path, filesystem), None, str(location))

    def what(self, name: str) -> str:
        """The name of a file in errors."""
        return f"{self.place}/{name}" if name else self.place

    def local(self, name: str) -> Path | None:
        """The path of a file. None in an object store."""
        return self.root / name if self.root is not None else None

    def create(self, name: str) -> PendingFile:
        """Begin a file."""
        with self.reading(name):
            return PendingFile(self, name)

    def write(self, name: str, content: bytes, *, durable: bool = True, private: bool = False) -> None:
        """Create or replace a small file as a whole. By default it is durable on return, including its directory.

        If it cannot be written, the previous file still exists. On a local file system, only its owner may read a ``private`` one.
        """
        with self.reading(name):
            if self.root is None:
                with self.filesystem.open_output_stream(name) as stream:
                    stream.write(content)
                return
            path = self.root / name
            written = path.with_name(f"{TEMPORARY}{uuid4().hex}-{path.name}")
            try:
                mode = 0o600 if private else 0o666
                with open(written, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
                    file.write(content)
                    file.flush()
                    if durable:
                        os.fsync(file.fileno())
                written.rename(path)
            except OSError:
                written.unlink(missing_ok=True)
                raise
        if durable:
            self.sync([str(PurePosixPath(name).parent)])

    def write_new(self, name: str, content: bytes) -> bool:
        """Create a small file as a whole, durably, on a local file system. False if there is a file of that name."""
        assert self.root is not None
        path = self.root / name
        written = path.with_name(f"{TEMPORARY}{uuid4().hex}-{path.name}")
        with self.reading(name):
            try:
                written.write_bytes(content)
                _fsync(written)
                # unlike a rename, this fails if another process has created the file
                os.link(written, path)
            except FileExistsError:
                return False
            finally:
                written.unlink(missing_ok=True)
        self.sync([str(PurePosixPath(name).parent)])
        return True

    def sync(self, names: Iterable[str], *, missing_ok: bool = False) -> None:
        """Make the names in directories durable, or the content of files of other writers."""
        if self.root is None:
            return
        for name in names:
            with self.reading(name):
                try:
                    _fsync(self.root / name)
                except FileNotFoundError:
                    if not missing_ok:
                        raise

    def read(self, name: str) -> bytes | None:
        """Read a small file. None if it does not exist."""
        with self.reading(name):
            try:
                if self.root is None:
                    return self._read_object(name)
                with self.filesystem.open_input_stream(name) as stream:
                    return bytes(stream.read())
            except FileNotFoundError:
                return None

    def _read_object(self, name: str) -> bytes:
        """Read an object. If it is replaced between the request for its size and the one for its content, read it again.

        In that case the content may be cut off, or padded with zeros, or the request fails.
        """
        for _ in range(_READS):
            size: int | None = None
            try:
                with self.filesystem.open_input_file(name) as file:
                    size = file.size()
                    content = bytes(file.read_at(size, 0))
            except OSError as error:
                now = self.filesystem.get_file_info(name)
                if now.type is fs.FileType.NotFound:
                    raise FileNotFoundError(name) from error
                if now.size == size or size is None:
                    raise
            else:
                if self.filesystem.get_file_info(name).size == len(content):
                    return content
        raise OSError(f"{name} is replaced all the time")

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        with self.reading(name):
            return bool(self.filesystem.get_file_info(name).type is fs.FileType.File)

    def files(self, directory: str) -> list[StoredFile]:
        """Files in a directory, by name. Empty if it does not exist. Subdirectories are left out."""
        with self.reading(directory):
            found = self.filesystem.get_file_info(fs.FileSelector(directory, allow_not_found=True))
        files = [StoredFile(info.base_name, info.size or 0, (info.mtime_ns or 0) / 1e9) for info in found if info.type is fs.FileType.File]
        return sorted(files, key=lambda file: file.name)

    def entries(self, directory: str) -> list[str]:
        """Names of everything in a directory. Empty if it does not exist."""
        with self.reading(directory):
            found = self.filesystem.get_file_info(fs.FileSelector(directory, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def make_directory(self, directory: str) -> None:
        """Create a directory and its parents, durably. No error if they exist."""
        if self.root is None:
            return
        path = self.root / directory
        with self.reading(directory):
            missing = [parent for parent in (path, *path.parents) if not parent.exists()]
            path.mkdir(parents=True, exist_ok=True)
            for made in missing:
                _fsync(made.parent)

    def remove_directory(self, directory: str) -> None:
        """Remove a directory and its content. No error if it does not exist."""
        with self.reading(directory), contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(directory)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files. No error if they do not exist."""
        for name in names:
            with self.reading(name), contextlib.suppress(FileNotFoundError):
                self.filesystem.delete_file(name)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Translate errors of a block that uses a file, here or through :attr:`filesystem`.

        Raises:
            DamagedFile: see :meth:`require_inside`.
        """
        self.require_inside(name)
        with os_errors(self.what(name)):
            yield

    @contextlib.contextmanager
    def parquet(self, path: str, *, checked: bool = False) -> Iterator[pq.ParquetFile]:
        """Open a Parquet file to read it in the block. ``checked``: with the checksums of its pages.

        Raises:
            DamagedFile: its content is not Parquet, or not what was written.
        """
        with self.reading(path):
            try:
                with pq.ParquetFile(path, filesystem=self.filesystem, page_checksum_verification=checked) as file:
                    yield file
            except pa.ArrowMemoryError:
                raise
            except pa.ArrowException:
                raise DamagedFile(self.what(path), path) from None

    def require_inside(self, name: str) -> None:
        """Check that a name does not lead out of the lake.

        Raises:
            DamagedFile: it does. It is from a file that another program has written.
        """
        try:
            inside(name)
        except ValueError:
            raise DamagedFile(f"a file of lake {self.place}", name, "names a path outside of the lake") from None


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
