"""Rows of ``pg_subscription`` as definitions. One that a hand made senseless is a definition with a problem, and none of the others'."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from subscriber.abc import TwoPhaseState
from subscriber.catalog import Definition
from subscriber.config import STORED, SubscriptionOptions
from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.integrity import unknown_value

__all__ = ["DEFINITION_COLUMNS", "definition"]

DEFINITION_COLUMNS: Final = f"""
s.oid::int8 AS oid, s.subname::text AS name, s.subenabled, s.subslotname::text AS slot_name, s.subpublications,
s.subtwophasestate::text AS subtwophasestate, s.subskiplsn::text AS subskiplsn, s.submade, s.subgeneration, s.subrefresh,
{", ".join(f"s.{each.column}{'::text' if each.codes else ''} AS {each.column}" for each in STORED.values())}
"""
"""Of ``subscriber.pg_subscription AS s``."""

# column -> values that it can have, that of a row which cannot be understood first
_WORDS: Final[Mapping[str, Collection[str]]] = {
    **{each.column: each.stored_words for each in STORED.values() if each.type.words},
    "subtwophasestate": ("d", "p", "e"),
}
# columns that are never NULL -> what stands for it in a row which cannot be understood
_GIVEN: Final[Mapping[str, object]] = {
    "subenabled": False,
    "subpublications": (),
    "subskiplsn": "0/0",
    **{each.column: each.default for each in STORED.values() if not each.type.words},
    "submade": True,
    "subgeneration": 0,
}


def definition(row: Mapping[str, Any], *, claimed: bool) -> Definition:
    """A row with :data:`DEFINITION_COLUMNS`, ``subconninfo`` and ``position``."""
    values, error = _understood(row)
    two_phase = TwoPhaseState(values["subtwophasestate"])
    options = SubscriptionOptions(
        two_phase=two_phase is not TwoPhaseState.DISABLED,
        **{name: each.loaded(values[each.column]) for name, each in STORED.items()},
    )
    return Definition(
        oid=values["oid"],
        name=values["name"],
        enabled=values["subenabled"],
        conninfo=values["subconninfo"],
        slot_name=values["slot_name"],
        publications=tuple(name for name in values["subpublications"] if name is not None),
        options=options,
        two_phase=two_phase,
        skip_lsn=Lsn.parse(values["subskiplsn"]),
        position=None if values["position"] is None else Lsn.parse(values["position"]),
        made=values["submade"],
        generation=values["subgeneration"],
        pending_refresh=values["subrefresh"],
        claimed=claimed,
        problem=None if error is None else str(error),
        remedy=None if error is None else error.hint,
    )


def _understood(row: Mapping[str, Any]) -> tuple[dict[str, Any], TargetError | None]:
    """The row with a default for each value that is not known, and the first of those as an error."""
    values, errors = dict(row), list[TargetError]()
    for column, words in _WORDS.items():
        if values[column] not in words:
            errors.append(unknown_value("pg_subscription", column, values[column], sorted(words)))
            values[column] = next(iter(words))
    for column, default in _GIVEN.items():
        if values[column] is None:
            known = ["true", "false"] if isinstance(default, bool) else ["anything but NULL"]
            errors.append(unknown_value("pg_subscription", column, None, known))
            values[column] = default
    return values, errors[0] if errors else None
