"""Sequences: what a publisher's sequence is, and what was done about it in a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self

from subscriber.errors import ConfigurationError
from subscriber.interfaces.values import TableName

__all__ = ["PublishedSequence", "SequenceChoice", "SequenceResult", "SequenceState"]

_BITS: Final = MappingProxyType({"smallint": 15, "integer": 31, "bigint": 63})


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSequence:
    """One sequence as the publisher has it, after CREATE SEQUENCE in the manual.

    Attributes:
        name: schema and name.
        type: ``smallint``, ``integer`` or ``bigint``.
        start, increment, minimum, maximum, cache, cycle: as in CREATE SEQUENCE.
        last_value: the last value that may have been handed out, including the values that sessions have in their caches.
        is_called: False: ``last_value`` is the next value.
        columns: the columns that take their values from it, with their tables. The first one owns it, if any does.
    """

    name: TableName
    type: str
    start: int
    increment: int
    minimum: int
    maximum: int
    cache: int
    cycle: bool
    last_value: int
    is_called: bool
    columns: tuple[tuple[TableName, str], ...] = ()

    @property
    def next_value(self) -> int:
        """The next value. It may be beyond the bounds."""
        return self.last_value + (self.increment if self.is_called else 0)

    def bounds(self, type: str) -> tuple[int, int]:
        """Minimum and maximum for a sequence of another type. A bound that is the default of its type becomes the default of the other."""
        own, other = _default_bounds(self.type, self.increment), _default_bounds(type, self.increment)
        return (
            other[0] if self.minimum == own[0] else self.minimum,
            other[1] if self.maximum == own[1] else self.maximum,
        )

    def fits(self, type: str) -> bool:
        """Whether a sequence of another type can have these values and bounds."""
        minimum, maximum = self.bounds(type)
        limit = 1 << _BITS[type]
        return -limit <= minimum < maximum < limit and minimum <= self.last_value <= maximum and minimum <= self.start <= maximum


def _default_bounds(type: str, increment: int) -> tuple[int, int]:
    limit = 1 << _BITS[type]
    return (1, limit - 1) if increment > 0 else (-limit, -1)


@dataclass(frozen=True, slots=True)
class SequenceChoice:
    """Which sequences of the publisher are set in the target.

    Attributes:
        kind: ``all`` of the database; ``owned``: those that columns of published tables own, or have in a default; ``none``. None: all if
            the publications have all tables of the database, else the owned ones; others that no column owns must be named.
        patterns: others, too, as ``--table`` of pg_dump has them. Without a schema, a pattern matches in all schemas.
    """

    kind: str | None = None
    patterns: tuple[str, ...] = ()

    @classmethod
    def parse(cls, values: Sequence[str]) -> Self:
        """From ``owned``, ``all``, ``none`` and patterns. Empty: the default.

        Raises:
            ConfigurationError: they contradict each other.
        """
        values = [values] if isinstance(values, str) else values
        kinds = {each for each in values if each in {"owned", "all", "none"}}
        patterns = tuple(each for each in values if each not in kinds)
        if len(kinds) > 1 or (patterns and kinds - {"owned"}):
            raise ConfigurationError(
                f"--sequences {' '.join(values)}: these exclude each other",
                hint="give all, none, or owned and names; a sequence that is called all is written as public.all",
            )
        if not all(patterns):
            raise ConfigurationError("--sequences with an empty name", hint="give a name, such as app.invoice_number")
        return cls(next(iter(kinds), "owned" if patterns else None), patterns)


class SequenceState(StrEnum):
    """What happened to a sequence of the target."""

    SET = "set"
    """It was set, or would be set."""
    EQUAL = "equal"
    """There was nothing to do."""
    LEFT = "left"
    """It was not changed, although it differs."""
    MISSING = "missing"
    """The target does not have it."""
    OMITTED = "omitted"
    """It was not chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """What was done about one sequence.

    Attributes:
        sequence: its name on the publisher; with other names (``map``), that of the target.
        state: what was done.
        place: what it is called in the target, for example ``sequence public.t_id_seq``; None: the target has none.
        next_value: the target's next value, if it was set.
        reason: why it was left, and what to do.
    """

    sequence: TableName
    state: SequenceState
    place: str | None = None
    next_value: int | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "schema": self.sequence.namespace,
            "sequence": self.sequence.name,
            "state": self.state.value,
            "place": self.place,
            "next_value": self.next_value,
            "reason": self.reason,
        }
