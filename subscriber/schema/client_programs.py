"""Find pg_dump and pg_restore, and run them.

pg_dump refuses a server that is newer than itself. So the programs must be at least as new as the publisher.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from subscriber.errors import ConfigurationError, PublisherError, PublisherUnavailable

__all__ = ["ClientPrograms", "find_client_programs", "run_program"]

_PLACES: Final = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")
_BINDIR_HINT: Final = "install PostgreSQL's client programs, and put their directory into PATH (or --bindir)"
_UNAVAILABLE: Final = re.compile(
    r"Connection refused|starting up|shutting down|recovery mode|terminating connection|closed the connection|could not receive data"
)
_VERSION: Final = re.compile(r"\(PostgreSQL\) (\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ClientPrograms:
    """A directory with pg_dump and pg_restore, and their major version."""

    bindir: Path
    version: int

    @property
    def pg_dump(self) -> Path:
        """The path of pg_dump."""
        return self.bindir / "pg_dump"

    @property
    def pg_restore(self) -> Path:
        """The path of pg_restore."""
        return self.bindir / "pg_restore"


async def find_client_programs(bindir: str | None, publisher: int, target: int) -> ClientPrograms:
    """Return the programs that fit both servers: not older than the publisher, and as near to the target's version as possible.

    Args:
        bindir: the only directory to look in; None: PATH, then the directories of the usual packages.
        publisher: the publisher's major version.
        target: the target's.

    Raises:
        ConfigurationError: there are no such programs, or only older ones.
    """
    found = [each for place in _directories(bindir) if (each := await _programs(place)) is not None]
    fitting = [each for each in found if each.version >= publisher]
    if fitting:
        wanted = max(publisher, target)
        return min(fitting, key=lambda each: abs(each.version - wanted))
    if not found:
        where = bindir or "PATH and the directories of the usual packages"
        raise ConfigurationError(
            f"pg_dump and pg_restore were not found in {where}",
            hint=f"install PostgreSQL's client programs, version {publisher} or later, and put their directory into PATH (or --bindir)",
        )
    newest = max(found, key=lambda each: each.version)
    raise ConfigurationError(
        f"pg_dump {newest.version} in {newest.bindir} is older than the publisher, which is PostgreSQL {publisher}",
        hint=f"install PostgreSQL's client programs, version {publisher} or later, and put their directory into PATH (or --bindir)",
    )


def _directories(bindir: str | None) -> Iterator[Path]:
    if bindir is not None:
        # absolute: a program without a slash would be looked for in PATH
        yield Path(bindir).absolute()
        return
    if (path := shutil.which("pg_dump")) is not None:
        yield Path(path).parent
    for place in _PLACES:
        yield from sorted(Path("/").glob(place), reverse=True)


async def _programs(bindir: Path) -> ClientPrograms | None:
    if not all((bindir / name).exists() for name in ("pg_dump", "pg_restore")):
        return None
    try:
        shown = await run_program(bindir / "pg_dump", ["--version"])
    except PublisherError:
        # it cannot be executed, or is Debian's wrapper without any version behind it
        return None
    match = _VERSION.search(shown)
    return ClientPrograms(bindir, int(match[1])) if match else None


async def run_program(program: Path, arguments: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
    """Run a program to its end, with English messages, and return its output. If the call is cancelled, the program is terminated.

    Args:
        program: its path.
        arguments: never a password, which other users of the system could see.
        env: further environment variables.

    Raises:
        PublisherUnavailable: the server ended its session, or refuses connections.
        PublisherError: it failed for another reason. The error has the first line of what it says.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            env={**os.environ, "LC_ALL": "C", **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise PublisherError(f"{program} cannot be executed: {error.strerror}", hint=_BINDIR_HINT) from error
    try:
        output, messages = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode != 0:
        lines = [line for line in messages.decode(errors="replace").splitlines() if "error" in line] or ["no message"]
        said = lines[0].removeprefix(f"{program.name}: ").removeprefix("error: ")
        denied = "permission denied" in said
        raise (PublisherUnavailable if _UNAVAILABLE.search(said) else PublisherError)(
            f"{program.name} failed: {said}", hint="pg_dump needs SELECT on every table that it describes" if denied else None
        )
    return output.decode(errors="surrogateescape")
