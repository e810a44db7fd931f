"""A file that remembers which ranges were found equal, so that an interrupted verification can be resumed.

The ranges of the resumed verification are compared in new snapshots. Each range was equal at the LSN of its own verification.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from subscriber.abc import TableName
from subscriber.errors import ConfigurationError
from subscriber.verification.parts import Part

__all__ = ["VerificationFile"]

_SAVE_SECONDS: Final = 1.0


class VerificationFile:
    """The file. A missing one is created.

    Args:
        path: of the file.
        identity: of the verification: the file of another one is refused.

    Raises:
        ConfigurationError: the file cannot be read, or belongs to another verification.
    """

    def __init__(self, path: Path, identity: Sequence[str]) -> None:
        self._path = path
        self._identity = list(identity)
        self._tables: dict[str, Any] = {}
        self._saved = time.monotonic()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            known, self._tables = found["verification"], dict(found["tables"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError):
            raise ConfigurationError(f"{path} is not the file of an interrupted verification", hint="name another file") from None
        if known != self._identity:
            raise ConfigurationError(f"{path} belongs to the verification of another subscription or target", hint="name another file")

    def table(self, table: TableName) -> _TableMemory:
        """The memory of one table."""
        return _TableMemory(self, str(table))

    def ranges(self, table: str, conditions: Sequence[str]) -> Mapping[int, int]:
        """Return the finished ranges of a table. If it is divided otherwise now, forget them."""
        entry = self._tables.get(table)
        if entry is None or entry.get("ranges") != list(conditions):
            entry = self._tables[table] = {"ranges": list(conditions), "done": {}}
        return {int(number): int(rows) for number, rows in entry["done"].items()}

    def note(self, table: str, number: int, rows: int) -> None:
        """Note a finished range."""
        self._tables[table]["done"][str(number)] = rows
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file.

        Raises:
            ConfigurationError: it cannot be written.
        """
        self._saved = time.monotonic()
        new = self._path.with_name(self._path.name + ".new")
        try:
            new.write_text(json.dumps({"verification": self._identity, "tables": self._tables}), encoding="utf-8")
            os.replace(new, self._path)
        except OSError as error:
            raise ConfigurationError(f"could not write {self._path}: {error.strerror}", hint="name another file") from None

    def remove(self) -> None:
        """Delete the file: the verification has ended."""
        self._path.unlink(missing_ok=True)


class _TableMemory:
    """See :class:`subscriber.verification.compare.Memory`."""

    def __init__(self, file: VerificationFile, table: str) -> None:
        self._file = file
        self._table = table

    def known(self, parts: Sequence[Part]) -> Mapping[int, int]:
        return self._file.ranges(self._table, [part.sql for part in parts])

    def note(self, number: int, rows: int) -> None:
        self._file.note(self._table, number, rows)
