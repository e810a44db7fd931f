"""Publications: which changes of which tables are published, and the union of several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.protocol.capabilities import Capabilities
from subscriber.testing.fake_publisher.server_errors import ServerError
from subscriber.testing.fake_publisher.tables import FakeColumn, TableShape

__all__ = ["Publication", "Published", "PublishedTable", "published"]

_OPERATIONS: Final = frozenset({"insert", "update", "delete", "truncate"})


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """One table of a publication.

    Attributes:
        columns: the column list, or None.
        where: the row filter, or None.
    """

    columns: tuple[str, ...] | None = None
    where: str | None = None


@dataclass(slots=True)
class Publication:
    """A publication.

    Attributes:
        oid, name: its own.
        tables: by name. Empty with ``all_tables``.
        all_tables: FOR ALL TABLES.
        schemas: TABLES IN SCHEMA.
        publish: the operations.
        generated_columns: ``publish_generated_columns = stored``.
        except_tables: EXCEPT, of FOR ALL TABLES.
        all_sequences: FOR ALL SEQUENCES.
    """

    oid: int
    name: str
    tables: dict[TableName, PublishedTable] = field(default_factory=dict)
    all_tables: bool = False
    schemas: frozenset[str] = frozenset()
    publish: frozenset[str] = _OPERATIONS
    generated_columns: bool = False
    except_tables: frozenset[TableName] = frozenset()
    all_sequences: bool = False

    def check(self, caps: Capabilities) -> None:
        """Check that the version has what the publication uses.

        Raises:
            ConfigurationError: it has not.
        """
        wrong = sorted(self.publish - _OPERATIONS)
        if wrong:
            raise ConfigurationError(f'unrecognized value for publication option "publish": "{wrong[0]}"')
        for what, used, known in (
            ("row filters", any(table.where for table in self.tables.values()), caps.row_filters),
            ("column lists", any(table.columns is not None for table in self.tables.values()), caps.column_lists),
            ("TABLES IN SCHEMA", bool(self.schemas), caps.at_least(15)),
            ("publish_generated_columns", self.generated_columns, caps.at_least(18)),
            ("EXCEPT", bool(self.except_tables), caps.at_least(19)),
            ("ALL SEQUENCES", self.all_sequences, caps.published_sequences),
        ):
            if used and not known:
                raise ConfigurationError(
                    f"PostgreSQL {caps.server_version // 10000} has no {what} of publications",
                    hint="choose a later version for the fake publisher",
                )

    def covers(self, shape: TableShape) -> PublishedTable | None:
        """How it publishes a table, or None: not at all. A schema, or all tables, publishes without list and filter."""
        if shape.name in self.except_tables:
            return None
        found = self.tables.get(shape.name)
        if found is not None and not self.all_tables and shape.name.namespace not in self.schemas:
            return found
        return (
            PublishedTable(found.columns if found else None) if self.all_tables or found or shape.name.namespace in self.schemas else None
        )


@dataclass(frozen=True, slots=True)
class Published:
    """What the subscribed publications together publish of a table.

    Attributes:
        columns: their places in the shape, in its order.
        operations: the published operations.
    """

    columns: tuple[int, ...]
    operations: frozenset[str]


def listed_columns(shape: TableShape, publication: Publication, table: PublishedTable) -> tuple[FakeColumn, ...]:
    """The columns that one publication publishes of a table."""
    if table.columns is not None:
        return tuple(column for column in shape.columns if column.name in table.columns)
    return tuple(column for column in shape.columns if not column.generated or (publication.generated_columns and column.generated == "s"))


def published(shape: TableShape, publications: Iterable[Publication]) -> Published | None:
    """Combine publications for a table. None: none of them publishes it.

    Raises:
        ServerError: they have different column lists.
    """
    lists: set[tuple[str, ...]] = set()
    operations: frozenset[str] = frozenset()
    for publication in publications:
        table = publication.covers(shape)
        if table is None:
            continue
        lists.add(tuple(column.name for column in listed_columns(shape, publication, table)))
        operations |= publication.publish
    if not lists:
        return None
    if len(lists) > 1:
        raise ServerError("0A000", f'cannot use different column lists for table "{shape.name}" in different publications')
    (names,) = lists
    return Published(tuple(shape.places[name] for name in names), operations)
