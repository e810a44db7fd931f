"""Which tables a subscription replicates, and under which names: the parameters ``map``, ``columns``, ``rename`` and ``exclude_table``.

Names on the left are the publisher's. A table has the name that ``map.SCHEMA.TABLE`` gives, else that of ``map.SCHEMA.*``, else its own.
``columns`` and ``rename`` name the table, and its columns, as the publisher does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

from subscriber.config.table_names import (
    IDENTIFIER,
    Name,
    TableOption,
    compiled_pattern,
    patterns_of,
    read_identifier,
    read_name,
    written,
    written_name,
)
from subscriber.errors import ConfigurationError

__all__ = ["COLUMNS", "MAP", "NO_MAPPING", "RENAME", "TableMapping", "parse_excluded", "table_mapping", "two_onto_one"]

_MAP_EXAMPLE: Final = "map.public.orders=sales.orders, or map.public.*=sales.*"
_COLUMNS_EXAMPLE: Final = "columns.public.orders=(id, amount)"
_RENAME_EXAMPLE: Final = "rename.public.orders=amount:total"
_MOST: Final = {"map": 2000, "columns": 1500, "rename": 1000, "exclude_table": 1000}
"""Characters in the target's catalog."""
_SCHEMA: Final = re.compile(rf"\s*({IDENTIFIER})\s*\.\s*\*\s*")
_LIST: Final = re.compile(rf"\s*{IDENTIFIER}\s*(?:,\s*{IDENTIFIER}\s*)*")
_PAIRS: Final = re.compile(rf"\s*{IDENTIFIER}\s*:\s*{IDENTIFIER}\s*(?:,\s*{IDENTIFIER}\s*:\s*{IDENTIFIER}\s*)*")
_EACH: Final = re.compile(IDENTIFIER)


def _too_long(name: str) -> tuple[str, str]:
    return f"{name} is longer than {_MOST[name]} characters", "divide the tables among several subscriptions, or use map.SCHEMA.*"


def _place(text: str) -> str:
    """A table, or all tables of a schema."""
    match = _SCHEMA.fullmatch(text)
    return f"{written(read_identifier(match[1]))}.*" if match else written_name(read_name(text, _MAP_EXAMPLE))


def _names(text: str) -> list[str]:
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    if _LIST.fullmatch(inner) is None:
        raise ConfigurationError(f'"{text}" is not a list of columns', hint=f"as in {_COLUMNS_EXAMPLE}")
    names = [read_identifier(each) for each in _EACH.findall(inner)]
    _require_once(names, "is named twice", _COLUMNS_EXAMPLE)
    return names


def _pairs(text: str) -> dict[str, str]:
    if _PAIRS.fullmatch(text) is None:
        raise ConfigurationError(f'"{text}" does not rename columns', hint=f"as in {_RENAME_EXAMPLE}")
    names = [read_identifier(each) for each in _EACH.findall(text)]
    _require_once(names[::2], "is renamed twice", _RENAME_EXAMPLE)
    _require_once(names[1::2], "is the new name of two columns", _RENAME_EXAMPLE)
    return dict(zip(names[::2], names[1::2], strict=True))


def _require_once(names: Sequence[str], problem: str, example: str) -> None:
    for name, following in pairwise(sorted(names)):
        if name == following:
            raise ConfigurationError(f'column "{name}" {problem}', hint=f"as in {example}")


def _key(example: str) -> TableOption:
    name = example.partition(".")[0]
    return TableOption(
        name=name,
        example=example,
        most=_MOST[name],
        too_long=_too_long(name),
        key=_place if name == "map" else lambda text: written_name(read_name(text, example)),
        value={
            "map": lambda _, text: _place(text),
            "columns": lambda _, text: f"({', '.join(map(written, _names(text)))})",
            "rename": lambda _, text: ", ".join(f"{written(old)}:{written(new)}" for old, new in _pairs(text).items()),
        }[name],
    )


MAP: Final = _key(_MAP_EXAMPLE)
COLUMNS: Final = _key(_COLUMNS_EXAMPLE)
RENAME: Final = _key(_RENAME_EXAMPLE)


def parse_excluded(name: str, text: str) -> str:
    """Read patterns, separated by commas.

    Raises:
        ConfigurationError: one of them is invalid, or they are too long.
    """
    if text in {"", "none"}:
        return ""
    patterns = ", ".join(patterns_of(text))
    if len(patterns) > _MOST["exclude_table"]:
        raise ConfigurationError(f"{name} is longer than {_MOST['exclude_table']} characters", hint="exclude tables by patterns with *")
    return patterns


@dataclass(frozen=True, slots=True)
class TableMapping:
    """Names and columns of the target by those of the publisher.

    Attributes:
        tables: names of single tables.
        schemas: other schemas for all other tables of a schema.
        excluded: patterns of tables that are left out.
        columns: the columns that are kept.
        renamed: new names of columns.
    """

    tables: Mapping[Name, Name]
    schemas: Mapping[str, str]
    excluded: Mapping[str, Sequence[re.Pattern[str]]]
    columns: Mapping[Name, Sequence[str]]
    renamed: Mapping[Name, Mapping[str, str]]

    def __bool__(self) -> bool:
        """Whether any table is mapped."""
        return bool(self.tables or self.schemas or self.excluded or self.columns or self.renamed)

    @property
    def renames(self) -> bool:
        """Whether a table or a column has another name, or a column is left out."""
        return bool(self.tables or self.schemas or self.columns or self.renamed)

    def excludes(self, name: Name) -> bool:
        """Whether a table of the publisher is left out."""
        return any(self.matches(pattern, name) for pattern in self.excluded)

    def matches(self, pattern: str, name: Name) -> bool:
        """Whether a table of the publisher matches a pattern of :attr:`excluded`."""
        parts = self.excluded[pattern]
        return all(map(re.Pattern.fullmatch, parts, name[-len(parts) :]))

    def target(self, name: Name) -> Name:
        """The target's name of a table or sequence of the publisher."""
        return self.tables.get(name) or (self.schemas.get(name[0], name[0]), name[1])

    def target_alone(self, name: Name) -> Name:
        """The target's name of a published table.

        Raises:
            ConfigurationError: ``map`` gives it to another table. That one's rows may be there, even if it is not published now.
        """
        target = self.target(name)
        others = [each for each in self.sources(target) if each != name] if name not in self.tables else []
        for other in others:
            # a table keeps its name, and a whole schema is mapped into its schema
            by_schema = other[0] in self.schemas and name[0] not in self.schemas and not self.excludes(other)
            if other in self.tables or by_schema:
                raise two_onto_one(other, name, target)
        return target

    def sources(self, name: Name) -> list[Name]:
        """The names that a table of the target may have on the publisher."""
        candidates = [source for source, target in self.tables.items() if target == name]
        candidates += [(source, name[1]) for source, target in self.schemas.items() if target == name[0]]
        return [each for each in dict.fromkeys([*candidates, name]) if self.target(each) == name]

    def changes_columns(self, name: Name) -> bool:
        """Whether a table of the publisher has other columns in the target."""
        return name in self.columns or name in self.renamed

    def kept(self, name: Name, columns: Iterable[str]) -> list[str]:
        """Those of a table's columns that are kept."""
        wanted = self.columns.get(name)
        return [column for column in columns if wanted is None or column in wanted]

    def lacking(self, name: Name, columns: Collection[str]) -> list[str]:
        """What names a column that a table does not have, as ``OPTION.SCHEMA.TABLE: the table has no published column NAME``."""
        named = [("columns", column) for column in self.columns.get(name, ())]
        named += [("rename", column) for column in self.renamed.get(name, {})]
        return [
            f"{option}.{written_name(name)}: the table has no published column {written(column)}"
            for option, column in named
            if column not in columns
        ]

    def require_columns(self, name: Name, columns: Collection[str]) -> None:
        """Check that a table has the columns that the mapping names. One that was renamed there would be left out, and its values lost.

        Raises:
            ConfigurationError: it does not.
        """
        if lacking := self.lacking(name, columns):
            raise ConfigurationError(
                lacking[0],
                hint="if it was renamed or dropped, drop the subscription, and create it with other options and copy_data = reconcile",
            )

    def column(self, name: Name, column: str) -> str:
        """The target's name of a column."""
        return self.renamed.get(name, {}).get(column, column)


@lru_cache(maxsize=16)
def table_mapping(tables: str, columns: str, renamed: str, excluded: str) -> TableMapping:
    """Read the stored texts of the four parameters.

    Raises:
        ConfigurationError: they contradict each other.
    """
    single: dict[Name, Name] = {}
    schemas: dict[str, str] = {}
    for source, target in MAP.values(tables).items():
        if source.endswith(".*") != target.endswith(".*"):
            raise ConfigurationError(f"map.{source}={target}: one is a table and the other one a schema", hint=f"as in {_MAP_EXAMPLE}")
        if source.endswith(".*"):
            schema = read_identifier(target[:-2])
            for first in (each for each, taken_by in schemas.items() if taken_by == schema):
                raise ConfigurationError(
                    f"map.{written(first)}.* and map.{source}: both would be schema {target[:-2]} of the target",
                    hint="map the tables of one of them by name: two tables could have the same one",
                )
            schemas[read_identifier(source[:-2])] = schema
        else:
            single[read_name(source, _MAP_EXAMPLE)] = read_name(target, _MAP_EXAMPLE)
    taken: dict[Name, Name] = {}
    for name, other in single.items():
        if other in taken:
            raise two_onto_one(taken[other], name, other)
        taken[other] = name
    mapping = TableMapping(
        tables=single,
        schemas=schemas,
        excluded={pattern: compiled_pattern(pattern) for pattern in patterns_of(excluded)} if excluded else {},
        columns={read_name(name, _COLUMNS_EXAMPLE): _names(value) for name, value in COLUMNS.values(columns).items()},
        renamed={read_name(name, _RENAME_EXAMPLE): _pairs(value) for name, value in RENAME.values(renamed).items()},
    )
    for name, pairs in mapping.renamed.items():
        kept = mapping.columns.get(name)
        for column in pairs if kept is not None else ():
            if column not in (kept or ()):
                raise ConfigurationError(
                    f'column "{column}" of table {written_name(name)} is renamed, and left out by columns', hint="remove one of both"
                )
        for column in kept or ():
            if column in pairs.values() and column not in pairs:
                raise ConfigurationError(
                    f'two columns of table {written_name(name)} would have the name "{column}"', hint="rename both, or leave one out"
                )
    return mapping


def two_onto_one(one: Name, other: Name, target: Name) -> ConfigurationError:
    """The error of two tables with one name in the target."""
    first, second = map(written_name, sorted((one, other)))
    return ConfigurationError(
        f"tables {first} and {second} of the publisher would both be table {written_name(target)} of the target",
        hint="give one of them another name, or leave it out: --map SCHEMA.TABLE=OTHER.NAME, --exclude-table SCHEMA.TABLE;"
        f" if only one is published, name it: --map SCHEMA.TABLE={written_name(target)}",
    )


NO_MAPPING: Final = table_mapping("", "", "", "")
