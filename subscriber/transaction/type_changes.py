"""Changes of a column's type: those that a target can make by itself, and those that leave the values as they are."""

from __future__ import annotations

from typing import Final

__all__ = ["is_exact", "keeps_values"]

_INTEGERS: Final = ("smallint", "integer", "bigint")
_TEXTS: Final = frozenset({"text", "character varying"})
_EXACT: Final = {
    **dict.fromkeys(_INTEGERS, frozenset({*_INTEGERS, "numeric"})),
    "numeric": frozenset({*_INTEGERS, "numeric"}),
    "real": frozenset({"double precision"}),
    **dict.fromkeys(_TEXTS, _TEXTS),
    "date": frozenset({"timestamp without time zone"}),
    "json": frozenset({"jsonb"}),
}
_SAME: Final = frozenset({"bit varying", "timestamp without time zone", "timestamp with time zone", "time without time zone"})
"""Types whose modifiers may change."""


def is_exact(old: str, new: str) -> bool:
    """Whether ALTER TYPE without USING gives the same values on every server. Types as ``format_type`` writes them."""
    before, after = _base(old), _base(new)
    return after in _EXACT.get(before, ()) or (before == after and before in _SAME)


def keeps_values(old: str, new: str) -> bool:
    """Whether ALTER TYPE changes no value, so that a column of a third type still has what the publisher's has.

    A change that does not fit raises an error on the publisher: of integers, of the lengths of texts, and of numbers of the same scale.
    """
    before, after = _base(old), _base(new)
    if before == after == "numeric":
        return new == "numeric" or _scale(old) == _scale(new)
    return {before, after} <= _TEXTS or (before in _INTEGERS and new in (*_INTEGERS, "numeric"))


def _scale(name: str) -> str:
    return name.partition(",")[2]


def _base(name: str) -> str:
    start, _, rest = name.partition("(")
    return (start.rstrip() + rest.partition(")")[2]) if rest else name
