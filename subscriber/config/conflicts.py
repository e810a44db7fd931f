"""The parameter ``conflict``: what to do about each kind of conflict, for the subscription and for single tables.

It is given as ``conflict.KIND=RULE`` for all tables, and as ``conflict.KIND.SCHEMA.TABLE=RULE`` for one, or as a mapping in Python. The
names of the kinds are those of PostgreSQL's conflicts. The names of the rules are those of pglogical and of PostgreSQL's proposal of
conflict resolvers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Final, Self

from subscriber.config.table_names import Name, TableOption, read_name, written_name
from subscriber.errors import ConfigurationError

__all__ = ["CONFLICT", "RULES", "ConflictRules", "TableRules"]

_UNIQUE: Final = ("error", "apply_remote", "keep_local", "last_update_wins")
_DIFFERS: Final = ("apply_remote", "keep_local", "last_update_wins")
_BY_TIME: Final = "last_update_wins"


@dataclass(frozen=True, slots=True)
class TableRules:
    """The rules of one table. The defaults are what a native subscription does."""

    insert_exists: str = "error"
    update_exists: str = "error"
    multiple_unique_conflicts: str = "error"
    update_missing: str = "skip"
    delete_missing: str = "skip"
    update_origin_differs: str = "apply_remote"
    delete_origin_differs: str = "apply_remote"

    @property
    def by_origin(self) -> tuple[str, ...]:
        """The kinds whose rule needs the origin of the existing row."""
        return tuple(kind for kind in ("update_origin_differs", "delete_origin_differs") if getattr(self, kind) != "apply_remote")

    @property
    def by_time(self) -> tuple[str, ...]:
        """The kinds whose rule needs the commit time of the existing row."""
        return tuple(kind for kind in RULES if getattr(self, kind) == _BY_TIME)

    @property
    def changed(self) -> tuple[str, ...]:
        """The kinds whose rule is not the default."""
        return tuple(kind for kind, rules in RULES.items() if getattr(self, kind) != rules[0])

    def without_origins(self) -> Self:
        """The same rules for a table whose rows all count as the subscription's own."""
        return replace(self, update_origin_differs="apply_remote", delete_origin_differs="apply_remote")


RULES: Final[Mapping[str, tuple[str, ...]]] = {
    "insert_exists": _UNIQUE,
    "update_exists": _UNIQUE,
    "multiple_unique_conflicts": _UNIQUE,
    "update_missing": ("skip", "insert", "error"),
    "delete_missing": ("skip", "error"),
    "update_origin_differs": _DIFFERS,
    "delete_origin_differs": _DIFFERS,
}
"""The rules of each kind of conflict, the default first."""
assert tuple(RULES) == tuple(each.name for each in fields(TableRules))


@dataclass(frozen=True, slots=True)
class ConflictRules:
    """All rules of a subscription.

    Attributes:
        general: those of tables without rules of their own.
        tables: those of the others, by schema and name.
    """

    general: TableRules = TableRules()
    tables: Mapping[Name, TableRules] = field(default_factory=dict)

    def of(self, schema: str, name: str) -> TableRules:
        """The rules of a table."""
        return self.tables.get((schema, name), self.general)

    def kinds(self, what: str) -> tuple[str, ...]:
        """The kinds that one of the tables has in this property of its rules, such as ``by_time``."""
        found = {kind for rules in (self.general, *self.tables.values()) for kind in getattr(rules, what)}
        return tuple(kind for kind in RULES if kind in found)

    def uses(self, kind: str) -> set[str]:
        """All rules for a kind of conflict."""
        return {getattr(rules, kind) for rules in (self.general, *self.tables.values())}

    @classmethod
    def read(cls, text: str, target: Callable[[Name], Name] = lambda name: name) -> Self:
        """Read the stored text. ``target``: returns the target's name of a table of the publisher."""
        general, tables = TableRules(), dict[Name, dict[str, str]]()
        for key, rule in CONFLICT.values(text).items():
            kind, table = _key(key)
            if table is None:
                general = replace(general, **{kind: rule})
            else:
                tables.setdefault(table, {})[kind] = rule
        return cls(general, {target(table): replace(general, **own) for table, own in tables.items()})


def _key(key: str) -> tuple[str, Name | None]:
    """The kind and the table of a key."""
    given, dot, table = key.partition(".")
    kind = given.strip().lower()
    if kind not in RULES:
        raise ConfigurationError(f'unrecognized conflict: "{given}"', hint=_hint(key, kind))
    return kind, read_name(table, f"conflict.{kind}.public.orders={RULES[kind][-1]}") if dot else None


def _hint(key: str, kind: str) -> str:
    table, _, last = key.rpartition(".")
    if last.strip().lower() in RULES:
        return f"the table follows the kind: conflict.{last.strip().lower()}.{table}=…"
    return _suggestion(kind, tuple(RULES))


def _written(key: str) -> str:
    kind, table = _key(key)
    return kind if table is None else f"{kind}.{written_name(table)}"


def _rule(key: str, text: str) -> str:
    kind, word = key.partition(".")[0], text.strip().lower()
    if word not in RULES[kind]:
        raise ConfigurationError(f'unrecognized rule for conflict {kind}: "{text.strip()}"', hint=_suggestion(word, RULES[kind]))
    return word


def _suggestion(word: str, known: tuple[str, ...]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}? one of {', '.join(known)}" if close else f"one of {', '.join(known)}"


CONFLICT: Final = TableOption(
    name="conflict",
    example="conflict.insert_exists=apply_remote",
    most=4000,
    too_long=("the conflict rules are longer than 4000 characters", "give a rule for all tables, and only the exceptions by table"),
    key=_written,
    value=_rule,
    keys="the kind of the conflict",
)
