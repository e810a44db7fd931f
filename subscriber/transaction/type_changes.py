"""Changes of a column's type that a target can make by itself: its rows get what the publisher's rows got."""

from __future__ import annotations

from typing import Final

__all__ = ["is_exact"]

_INTEGERS: Final = ("smallint", "integer", "bigint")
_EXACT: Final = {
    **dict.fromkeys(_INTEGERS, frozenset({*_INTEGERS, "numeric"})),
    "numeric": frozenset({*_INTEGERS, "numeric"}),
    "real": frozenset({"double precision"}),
    "text": frozenset({"text", "character varying"}),
    "character varying": frozenset({"text", "character varying"}),
    "date": frozenset({"timestamp without time zone"}),
    "json": frozenset({"jsonb"}),
}
_SAME: Final = frozenset({"bit varying", "timestamp without time zone", "timestamp with time zone", "time without time zone"})
"""Types whose modifiers may change."""


def is_exact(old: str, new: str) -> bool:
    """Whether ALTER TYPE without USING gives the same values on every server. Types as ``format_type`` writes them."""
    before, after = _base(old), _base(new)
    return after in _EXACT.get(before, ()) or (before == after and before in _SAME)


def _base(name: str) -> str:
    start, _, rest = name.partition("(")
    return (start.rstrip() + rest.partition(")")[2]) if rest else name
