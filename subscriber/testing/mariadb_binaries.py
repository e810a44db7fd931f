"""Find and install MariaDB's server programs: ``python -m subscriber.testing.mariadb_binaries``.

No Python wheel contains them. For root on a system with apt, only the packages with the programs are installed (``mariadb-server-core``:
no service, no system user, no database). Others get a message with the ways to install MariaDB or to skip its tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.testing.apt import apt_install, may_install

__all__ = ["BINDIR_VARIABLE", "WITHOUT_VARIABLE", "MariaDBPrograms", "find_mariadb", "install_mariadb", "is_done_without"]

BINDIR_VARIABLE: Final = "SUBSCRIBER_MARIADB_BINDIR"
"""The directory of ``mariadbd``, ``mariadb-install-db`` and ``mariadb``, if they are in none of the usual ones."""
WITHOUT_VARIABLE: Final = "SUBSCRIBER_TEST_WITHOUT_MARIADB"
"""``1``: skip the tests that need MariaDB."""

_PACKAGES: Final = ("mariadb-server-core", "mariadb-client-core")
_DIRECTORIES: Final = ("/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin", "/usr/libexec", "/usr/local/mysql/bin")
_VERSION: Final = re.compile(r"Ver (\d+)\.(\d+)\.\d+-MariaDB", re.ASCII)
_REMEDY: Final = (
    f"apt-get install {' '.join(_PACKAGES)}, or set {BINDIR_VARIABLE} to the directory of mariadbd, "
    f"or set {WITHOUT_VARIABLE}=1 to skip the tests that need it"
)


@dataclass(frozen=True, slots=True)
class MariaDBPrograms:
    """The programs, and their version as (major, minor)."""

    server: Path
    install_db: Path
    client: Path
    version: tuple[int, int]


def is_done_without() -> bool:
    """Whether the tests that need MariaDB are to be skipped."""
    return os.environ.get(WITHOUT_VARIABLE, "") not in {"", "0"}


def find_mariadb() -> MariaDBPrograms:
    """Find the programs: in the directory that :data:`BINDIR_VARIABLE` names, on the PATH, in the usual directories.

    Raises:
        ConfigurationError: they were not found.
    """
    named = os.environ.get(BINDIR_VARIABLE)
    path = os.pathsep.join([*([named] if named else []), os.environ.get("PATH", os.defpath), *_DIRECTORIES])
    server, install_db, client = (shutil.which(name, path=path) for name in ("mariadbd", "mariadb-install-db", "mariadb"))
    if server is None or install_db is None or client is None:
        raise ConfigurationError("no MariaDB server programs were found", hint=_REMEDY)
    try:
        shown = subprocess.run([server, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"{server} does not run", hint=_REMEDY) from error
    match = _VERSION.search(shown)
    if match is None:
        raise ConfigurationError(f"{server} is not a MariaDB server", hint=_REMEDY)
    return MariaDBPrograms(Path(server), Path(install_db), Path(client), (int(match[1]), int(match[2])))


def install_mariadb() -> MariaDBPrograms:
    """Find the programs. If they are missing, and this is root, install them by apt.

    Raises:
        ConfigurationError: they are missing, and this is not root, or apt is missing or failed.
    """
    try:
        return find_mariadb()
    except ConfigurationError:
        if not may_install():
            raise
    apt_install(_PACKAGES, _REMEDY)
    return find_mariadb()


def main() -> int:
    """Install MariaDB, or print why not; for ``make test``."""
    if is_done_without():
        sys.stdout.write(f"{WITHOUT_VARIABLE} is set: the tests that need MariaDB are skipped\n")
        return 0
    try:
        found = install_mariadb()
    except ConfigurationError as error:
        sys.stderr.write(error.one_line() + "\n")
        return 1
    sys.stdout.write(f"MariaDB {'.'.join(map(str, found.version))}: {found.server}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
