"""Where large transactions wait for their commit: files in a private directory, gone with the process.

Layout
    ``<base>/<hash of key>/<n>.spool``, a file a transaction; :mod:`subscriber.apply.spool_file` says what is in it.

Privacy
    The content is rows. Directories are 0700, files 0600; a directory that somebody else owns or may write to is refused. A process that is
    killed cannot clean up: the next one with the same key does. Two processes must not use one key at the same time; whoever opens
    the spool holds the subscription, of which there is one.

Not durable, on purpose
    What was not applied is sent again by the publisher: nothing is synced to disk, and nothing is read after a restart.

Threads
    All file work happens in threads, a block at a time, so that the event loop goes on. A cancelled call ends only when its thread has:
    nothing is written behind the caller's back.

Rejected: one file held open a transaction (a publisher may have more open transactions than we have descriptors); unlinking a file right
after it was made (needs just that).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Self, TypeVar

from subscriber.apply.spool_file import SpoolFile, blocks, spool_failure
from subscriber.errors import SpoolError

__all__ = ["SpoolDirectory", "SpooledPart"]

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

T = TypeVar("T")


async def _in_thread(work: Callable[[], T]) -> T:
    """Run it in a thread. When cancelled, wait for its end first: a thread cannot be stopped."""
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it as lost
        raise


class SpooledPart:
    """The spilled part of one transaction, read back; implements :class:`subscriber.transaction.model.SpooledRecords`."""

    def __init__(self, file: SpoolFile) -> None:
        self._file = file

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        """Read it from record number ``start`` on, a block at a time. May be called more than once.

        Raises:
            SpoolError: the file cannot be read, or is not as it was written.
        """
        while records := await _in_thread(partial(self._file.read_from, start)):
            start += len(records)
            yield records
            del records  # not kept while the next ones are read

    async def discard(self) -> None:
        """Remove the file. Idempotent."""
        await _in_thread(self._file.unlink)


class SpoolDirectory:
    """The spool of one stream, in a directory of its own; implements :class:`subscriber.abc.Spool`.

    Used as an async context manager, or with :meth:`open` and :meth:`close`. A spool id may be used anew once it was discarded or its
    reader was made: the new part has nothing to do with the old one.

    Args:
        base: the directory below which it is made; None: ``subscriber-<uid>`` in the system's temporary directory.
        key: names the stream among all that may use the same base, for example target, subscription and table. No two open spools have
            the same one.
    """

    def __init__(self, base: str | None, key: str) -> None:
        # the default's name can be guessed and its parent is open to everybody: no symbolic link is followed there
        self._base = Path(tempfile.gettempdir()) / f"subscriber-{os.geteuid()}" if base is None else Path(os.path.realpath(base))
        self._directory = self._base / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._files: dict[int, SpoolFile] = {}
        self._numbers = count(1)

    @classmethod
    async def probe(cls, base: str | None) -> None:
        """See whether a directory can be made there, and remove it again; ``base`` itself stays.

        Raises:
            SpoolError: it cannot.
        """
        async with cls(base, secrets.token_hex(16)):
            pass

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._directory

    def is_left(self) -> bool:
        """Whether an earlier process of the same key left it."""
        return self._directory.exists()

    async def open(self) -> None:
        """Make the directory, and remove what an earlier process of the same key left in it.

        Raises:
            SpoolError: it cannot be made, or is not private to this user.
        """
        await _in_thread(self._prepare)

    async def sweep(self) -> None:
        """Remove what an earlier process of the same key left, where nobody will open it again.

        Raises:
            SpoolError: as :meth:`open`.
        """

        def work() -> None:
            if self.is_left():
                self._prepare()
                self._remove()

        await _in_thread(work)

    async def close(self) -> None:
        """Remove the directory with all that is in it. Idempotent."""
        self._files.clear()
        await _in_thread(self._remove)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _prepare(self) -> None:
        for path in (self._base, self._directory):
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                found = path.lstat()
            except OSError as error:
                raise spool_failure("make spool directory", path, error) from error
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
                raise SpoolError(
                    f'spool directory "{path}" is not private: it belongs to somebody else, or others may write to it',
                    hint="let spool_directory name a directory that belongs to the user who runs this, with mode 0700",
                )
        self._remove()
        try:
            self._directory.mkdir(mode=0o700)
        except OSError as error:
            raise spool_failure("make spool directory", self._directory, error) from error

    def _remove(self) -> None:
        try:
            shutil.rmtree(self._directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise spool_failure("remove spool directory", self._directory, error) from error

    async def append(self, spool_id: int, records: Sequence[bytes]) -> None:
        """Add records to a transaction's part, creating it with the first.

        Raises:
            SpoolError: disk full, no permission.
        """
        file = self._files.get(spool_id)
        if file is None:
            file = self._files[spool_id] = SpoolFile(self._directory / f"{next(self._numbers)}.spool")
        for block in blocks(records):
            await _in_thread(partial(file.append, block))

    async def truncate(self, spool_id: int, count: int) -> None:
        """Keep only the first ``count`` records of a part.

        Raises:
            SpoolError: there is no such part, or its file is damaged.
        """
        file = self._part(spool_id)
        await _in_thread(partial(file.truncate, count))

    async def discard(self, spool_id: int) -> None:
        """Forget a part. Unknown ids are fine.

        Raises:
            SpoolError: no permission.
        """
        file = self._files.pop(spool_id, None)
        if file is not None:
            await _in_thread(file.unlink)

    async def read(self, spool_id: int, start: int) -> Sequence[bytes]:
        """Some records of a part, from number ``start`` on; none behind the last one.

        Raises:
            SpoolError: there is no such part, or its file cannot be read or is damaged.
        """
        return await _in_thread(partial(self._part(spool_id).read_from, start))

    def reader(self, spool_id: int) -> SpooledPart:
        """The part as a transaction reads it; from now on it is the reader's, and to be discarded there.

        Raises:
            SpoolError: there is no such part.
        """
        file = self._part(spool_id)
        del self._files[spool_id]
        return SpooledPart(file)

    def _part(self, spool_id: int) -> SpoolFile:
        try:
            return self._files[spool_id]
        except KeyError:
            raise SpoolError(f'nothing was spilled under number {spool_id} in "{self._directory}"') from None
