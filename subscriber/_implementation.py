"""The compiled core: the modules of the hot path exist in two forms, Python and C, which are made from one source.

Cython compiles these modules at installation, if a C compiler is present. The result is ``subscriber/_compiled``, with one file for each
module. Its name contains a digest of the source. So a compiled module whose source was changed is never used: Python runs the source.

The environment variable ``SUBSCRIBER_IMPLEMENTATION`` selects the form: ``python`` or ``c``. By default the compiled form is used where
it exists.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final

__all__ = ["FOLDER", "MODULES", "VARIABLE", "compiled_file", "declarations_file", "implementation", "install", "source_file"]

VARIABLE: Final = "SUBSCRIBER_IMPLEMENTATION"
MODULES: Final = (
    "subscriber.protocol.frames",
    "subscriber.protocol.tuples",
    "subscriber.sinks.postgres.apply.arrays",
    "subscriber.transaction.reassembly",
    "subscriber.walreceiver.copy_data",
)
"""The modules of the compiled core."""
_PACKAGE: Final = os.path.dirname(os.path.abspath(__file__))
FOLDER: Final = os.path.join(_PACKAGE, "_compiled")
"""Folder of the compiled modules."""


def source_file(module: str) -> str:
    """The path of the source of a module of the compiled core."""
    return os.path.join(_PACKAGE, *module.split(".")[1:]) + ".py"


def declarations_file(module: str) -> str:
    """The path of a module's declarations in Cython. Few modules have them: those that call functions in C."""
    return source_file(module).removesuffix(".py") + ".pxd"


def compiled_file(module: str) -> str:
    """The path of the compiled form of a module, which may not exist."""
    content = b""
    for name in filter(os.path.exists, (source_file(module), declarations_file(module))):
        with open(name, "rb") as source:
            content += source.read()
    digest = importlib.util.source_hash(content).hex()
    return os.path.join(FOLDER, f"{module}-{digest}{importlib.machinery.EXTENSION_SUFFIXES[0]}")


def implementation() -> str:
    """The form that is used: ``c`` if every module of the core is compiled, else ``python``."""
    # in a zip, as executors of Spark have this package, there is no folder and no source file
    compiled = os.path.isdir(FOLDER) and all(os.path.exists(compiled_file(module)) for module in MODULES)
    return "c" if _chosen() != "python" and compiled else "python"


def _chosen() -> str:
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in {"", "c", "python"}:
        raise ImportError(f'invalid value for {VARIABLE}: "{chosen}" (hint: it is "c" or "python")')
    return chosen


class _Finder:
    """A finder of ``sys.meta_path``."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        file = compiled_file(fullname)
        return importlib.util.spec_from_file_location(fullname, file) if os.path.exists(file) else None


def install() -> None:
    """Let imports find the compiled modules.

    Raises:
        ImportError: ``SUBSCRIBER_IMPLEMENTATION`` has an invalid value, or asks for a compiled form that does not exist.
    """
    chosen = _chosen()
    if chosen == "python" or (not chosen and not os.path.isdir(FOLDER)):
        return
    if chosen == "c" and implementation() != "c":
        raise ImportError(
            f"{VARIABLE} is c, but the compiled core does not exist"
            " (hint: install a C compiler, then install pg-subscriber again; or unset the variable)"
        )
    sys.meta_path.insert(0, _Finder)
