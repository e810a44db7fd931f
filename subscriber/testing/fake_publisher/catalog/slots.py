"""The functions and the view of slots, as people and drivers use them in SQL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend.results import NAME, Result, known, result
from subscriber.testing.fake_publisher.replication.requests import create_logical_slot, drop_slot
from subscriber.testing.fake_publisher.server_errors import ServerError

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["QUERIES"]

_LSN: Final = 3220
_RECORD: Final = 2249
_VOID: Final = 2278
_ARGUMENT: Final = re.compile(r"'((?:[^']|'')*)'|(\w+)")
_CREATED: Final = {"slot_name": NAME, "lsn": _LSN}
_CREATED_RECORD: Final = {"pg_create_logical_replication_slot": _RECORD}
_DROPPED: Final = {"pg_drop_replication_slot": _VOID}


def _most_arguments(session: Session) -> int:
    caps = session.publisher.caps
    return 3 + caps.at_least(14) + caps.at_least(17)


async def _create(session: Session, values: Mapping[str, str]) -> tuple[str, object]:
    found = _ARGUMENT.findall(values["arguments"])
    if len(found) > _most_arguments(session):
        types = ", ".join("boolean" if word else "unknown" for _, word in found)
        hint = "No function matches the given name and argument types. You might need to add explicit type casts."
        name = f"{values.get('schema', '')}pg_create_logical_replication_slot"
        raise ServerError("42883", f"function {name}({types}) does not exist", hint=hint)
    given = [literal or word.lower() for literal, word in found]
    name, plugin, *flags = given
    temporary, two_phase, failover, *_ = [*(flag in {"true", "t"} for flag in flags), False, False, False]
    slot = await create_logical_slot(session, name, plugin, temporary=temporary, two_phase=two_phase, failover=failover)
    return name, slot.confirmed_flush_lsn


async def _create_row(session: Session, values: Mapping[str, str]) -> Result:
    return result(_CREATED, [await _create(session, values)])


async def _create_record(session: Session, values: Mapping[str, str]) -> Result:
    name, lsn = await _create(session, values)
    return result(_CREATED_RECORD, [(f"({name},{lsn})",)])


async def _drop(session: Session, values: Mapping[str, str]) -> Result:
    await drop_slot(session, values["name"], wait=False)
    return result(_DROPPED, [("",)])


def _names(session: Session, values: Mapping[str, str]) -> Result:
    names = [name for name in session.publisher.slots if name == values.get("name", name)]
    return result({"slot_name": NAME}, [(name,) for name in names])


# {schema} is empty, or pg_catalog with its dot
QUERIES: Final = (
    known("SELECT * FROM {schema}pg_create_logical_replication_slot({arguments})", _create_row, result(_CREATED, [])),
    known("SELECT {schema}pg_create_logical_replication_slot({arguments})", _create_record, result(_CREATED_RECORD, [])),
    known("SELECT {schema}pg_drop_replication_slot('{name}')", _drop, result(_DROPPED, [])),
    known("SELECT slot_name FROM {schema}pg_replication_slots", _names),
    known("SELECT slot_name FROM {schema}pg_replication_slots WHERE slot_name = '{name}'", _names),
)
