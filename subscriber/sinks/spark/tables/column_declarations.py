"""How the publisher declares a table's columns, as of the last change in the lake's table. Stored in the table's directory.

ALTER TABLE casts values on the publisher. Only the old declaration shows whether the values in the lake are still the same (see
``type_changes.py``). If that is unknown, the column is doubtful from then on, because it may become a replica identity much later.

The document is written before the commit that makes it true. It also contains the previous declarations. The LSN of the table shows which
of the two are valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.documents import parse_document, write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.schema.table_schema import TableSchema

__all__ = ["ColumnDeclarations", "DeclaredColumns"]

_NAME: Final = "_declared.json"
"""Readers of Delta, and programs that clean up its directories, ignore names that begin with an underscore."""


@dataclass(frozen=True, slots=True)
class DeclaredColumns:
    """A table's columns as of an LSN. ``doubtful``: columns in which rows may have other values than on the publisher."""

    lsn: Lsn
    schema: TableSchema
    doubtful: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for the document."""
        return {"lsn": str(self.lsn), "schema": self.schema.to_json(), "doubtful": sorted(self.doubtful)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DeclaredColumns:
        return cls(Lsn.parse(data["lsn"]), TableSchema.from_json(data["schema"]), frozenset(data["doubtful"]))


@dataclass(slots=True)
class ColumnDeclarations:
    """The declarations of all tables of a lake, for its applier.

    Attributes:
        storage: of the lake.
        known: by a table's directory: the Delta application that commits the table, and the content of its document.
    """

    storage: Storage
    known: dict[str, tuple[str, tuple[DeclaredColumns, ...]]] = field(default_factory=dict)

    def find(self, directory: str, application: str, applied: Lsn | None) -> DeclaredColumns | None:
        """The declarations of a table at an LSN. None if unknown."""
        if directory not in self.known:
            self.known[directory] = self._read(f"{directory}/{_NAME}")
        owner, documents = self.known[directory]
        if owner != application or applied is None:
            return None
        return next((one for one in reversed(documents) if one.lsn <= applied), None)

    def _read(self, name: str) -> tuple[str, tuple[DeclaredColumns, ...]]:
        hint = "remove it: types that change in the next round are not noticed then"
        return parse_document(self.storage, name, _parsed, hint) or ("", ())

    def keep(self, directory: str, application: str, before: DeclaredColumns | None, now: DeclaredColumns) -> None:
        """Store the declarations that will be valid once the table is at an LSN. ``before`` is the result of :meth:`find`."""
        same = before is not None and (before.schema, before.doubtful) == (now.schema, now.doubtful)
        documents = tuple(one for one in (before, None if same else now) if one is not None)
        if self.known.get(directory) == (application, documents):
            return
        self.known.pop(directory, None)
        document = {"application": application, "declared": [one.to_json() for one in documents]}
        write_document(self.storage, f"{directory}/{_NAME}", document)
        self.known[directory] = application, documents


def _parsed(document: dict[str, Any]) -> tuple[str, tuple[DeclaredColumns, ...]]:
    return document["application"], tuple(map(DeclaredColumns.from_json, document["declared"]))
