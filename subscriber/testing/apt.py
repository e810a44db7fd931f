"""Install packages of Debian for tests, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from subscriber.errors import ConfigurationError

__all__ = ["apt_install", "may_install"]

_APT: Final = ("apt-get", "-o", "DPkg::Lock::Timeout=300")


def may_install() -> bool:
    """Whether this is root, on a system with apt."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def apt_install(packages: Sequence[str], remedy: str) -> None:
    """Install packages.

    Args:
        packages: their names.
        remedy: the hint of an error.

    Raises:
        ConfigurationError: apt failed.
    """
    install = ["install", "--yes", "--no-install-recommends", *packages]
    done = _run(install)
    if done.returncode != 0:  # the package lists are missing or old
        _run(["update"])
        done = _run(install)
    if done.returncode != 0:
        error = ConfigurationError(f"apt-get could not install {' '.join(packages)}", hint=remedy)
        error.add_note(" ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]))
        raise error


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_APT, *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=900,
    )
