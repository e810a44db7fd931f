"""The spool for large transactions: files in a private directory, which are deleted with the process.

Layout
    ``<base>/<hash of key>/<n>.spool``, one file per transaction. :mod:`subscriber.apply.receiving.spool_file` defines its format.

Privacy
    The content is rows. Directories are 0700, files 0600. A directory that another user owns or may write to is rejected. A killed
    process cannot clean up; the next one with the same key does. Two processes must not use a key at the same time. This is safe, because
    only the process that holds the subscription opens its spool.

Not durable, on purpose
    The publisher sends transactions that were not applied again. So nothing is flushed to disk, and nothing is read after a restart.

Threads
    All file work is done in threads, one block at a time, so that the event loop is not blocked. A cancelled call ends only when its
    thread has ended, so that nothing is written after it.

Rejected: one open file per transaction (a publisher may have more open transactions than this process may open files); unlinking a file
right after it was created (needs an open file too).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Self

from subscriber.apply.receiving.spool_file import SpoolFile, blocks, spool_failure
from subscriber.errors import SpoolError
from subscriber.threads import run_in_thread

__all__ = ["SpoolDirectory", "SpooledPart", "private_directory"]

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class SpooledPart:
    """The spilled records of one transaction, for reading; implements :class:`subscriber.transaction.model.SpooledRecords`."""

    def __init__(self, file: SpoolFile) -> None:
        self._file = file

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        """Read from record number ``start``, one block at a time. May be called more than once.

        Raises:
            SpoolError: the file cannot be read, or is damaged.
        """
        while records := await run_in_thread(partial(self._file.read_from, start)):
            start += len(records)
            yield records
            del records  # free them before the next ones are read

    async def discard(self) -> None:
        """Remove the file. Idempotent."""
        await run_in_thread(self._file.unlink)


def _temporary_directory() -> Path:
    """The system's; TMPDIR even if it cannot be written to, where Python would silently take another one.

    Raises:
        SpoolError: there is none, for example in a container with a read-only root file system.
    """
    if named := os.environ.get("TMPDIR"):
        return Path(named)
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise SpoolError(
            "there is no directory for temporary files that can be written to",
            hint="set spool_directory or TMPDIR to a directory that belongs to the user who runs this",
        ) from error


def _base_directory(base: str | None) -> Path:
    # the default's name can be guessed, and all users can write to its parent: symbolic links are not followed there
    return _temporary_directory() / f"subscriber-{os.geteuid()}" if base is None else Path(os.path.realpath(base))


def private_directory(path: Path, what: str, setting: str) -> None:
    """Create a directory if it does not exist, and check that only this user can write to it. It blocks.

    Args:
        path: of the directory.
        what: it is, for the error.
        setting: that names it.

    Raises:
        SpoolError: it cannot be created, or is not private.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise spool_failure(f"create {what}", path, error, setting) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise SpoolError(
            f'{what} "{path}" is not private: another user owns it or may write to it',
            hint=f"set {setting} to a directory with mode 0700 that belongs to the user who runs this",
        )


class SpoolDirectory:
    """The spool of one stream, in its own directory; implements :class:`subscriber.interfaces.Spool`.

    Use it as an async context manager, or with :meth:`open` and :meth:`close`. A spool id may be reused after it was discarded or its
    reader was created. The new file is independent of the old one.

    Args:
        base: the parent directory; None: ``subscriber-<uid>`` in the system's temporary directory.
        key: identifies the stream among all that may use the same base, for example target, subscription and table. Two open spools
            must have different keys.
    """

    def __init__(self, base: str | None, key: str) -> None:
        self._base = _base_directory(base)
        self._directory = self._base / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._files: dict[int, SpoolFile] = {}
        self._numbers = count(1)

    @staticmethod
    async def probe(base: str | None) -> None:
        """Check that files can be created there. On Linux, a process that is killed meanwhile leaves nothing. ``base`` itself stays.

        Raises:
            SpoolError: they cannot.
        """

        def work() -> None:
            path = _base_directory(base)
            private_directory(path, "spool directory", "spool_directory")
            try:
                tempfile.TemporaryFile(dir=path).close()
            except OSError as error:
                raise spool_failure("create a file in spool directory", path, error) from error

        await run_in_thread(work)

    @property
    def directory(self) -> Path:
        return self._directory

    def is_left(self) -> bool:
        """Whether an earlier process with the same key left it."""
        return self._directory.exists()

    async def open(self) -> None:
        """Create the directory, and remove what an earlier process with the same key left in it.

        Raises:
            SpoolError: it cannot be created, or is not private to this user.
        """
        await run_in_thread(self._prepare)

    async def sweep(self) -> None:
        """Remove what an earlier process with the same key left, if the spool will not be opened again.

        Raises:
            SpoolError: as :meth:`open`.
        """

        def work() -> None:
            if self.is_left():
                self._prepare()
                self._remove()

        await run_in_thread(work)

    async def close(self) -> None:
        """Remove the directory with its content. Idempotent."""
        self._files.clear()
        await run_in_thread(self._remove)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _prepare(self) -> None:
        for path in (self._base, self._directory):
            private_directory(path, "spool directory", "spool_directory")
        self._remove()
        try:
            self._directory.mkdir(mode=0o700)
        except OSError as error:
            raise spool_failure("create spool directory", self._directory, error) from error

    def _remove(self) -> None:
        try:
            shutil.rmtree(self._directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise spool_failure("remove spool directory", self._directory, error) from error

    async def append(self, spool_id: int, records: Sequence[bytes]) -> None:
        file = self._files.get(spool_id)
        if file is None:
            file = self._files[spool_id] = SpoolFile(self._directory / f"{next(self._numbers)}.spool")
        for block in blocks(records):
            await run_in_thread(partial(file.append, block))

    async def truncate(self, spool_id: int, count: int) -> None:
        file = self._part(spool_id)
        await run_in_thread(partial(file.truncate, count))

    async def discard(self, spool_id: int) -> None:
        file = self._files.pop(spool_id, None)
        if file is not None:
            await run_in_thread(file.unlink)

    async def read(self, spool_id: int, start: int) -> Sequence[bytes]:
        return await run_in_thread(partial(self._part(spool_id).read_from, start))

    def reader(self, spool_id: int) -> SpooledPart:
        file = self._part(spool_id)
        del self._files[spool_id]
        return SpooledPart(file)

    def _part(self, spool_id: int) -> SpoolFile:
        try:
            return self._files[spool_id]
        except KeyError:
            raise SpoolError(f'nothing was spilled under number {spool_id} in "{self._directory}"') from None
