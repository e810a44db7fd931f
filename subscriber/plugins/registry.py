"""Find a plugin by name: a built-in one, or ``package.module:Class``."""

from __future__ import annotations

import importlib
from typing import Final

from subscriber.errors import ConfigurationError

__all__ = ["BUILTIN", "find_plugin"]

BUILTIN: Final = {
    "debezium": "subscriber.plugins.debezium:Debezium",
    "jsonl": "subscriber.plugins.jsonl:JsonLinesPlugin",
    "pgoutput": "subscriber.plugins.pgoutput:PgOutput",
    "test_decoding": "subscriber.plugins.test_decoding:TestDecoding",
    "wal2json": "subscriber.plugins.wal2json:Wal2Json",
}
"""The names of the built-in plugins, with their classes."""


def find_plugin(name: str) -> object:
    """Import the class of a plugin and create the plugin.

    Args:
        name: of a built-in plugin, or ``package.module:Class``. The class is called without arguments.

    Raises:
        ConfigurationError: there is no such plugin, or it cannot be created.
    """
    module_name, colon, attribute = BUILTIN.get(name, name).partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(
            f'there is no output plugin "{name}"', hint=f"built in: {', '.join(sorted(BUILTIN))}; your own: package.module:Class"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise ConfigurationError(
            f'output plugin "{name}": cannot import {error.name or module_name}', hint="install the package, or set PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigurationError(f'output plugin "{name}": module {module_name} has no class {attribute}', hint="correct the name")
    try:
        return found()
    except TypeError as error:
        raise ConfigurationError(
            f'output plugin "{name}": {attribute} cannot be called without arguments', hint="read settings in startup, from ctx"
        ) from error
