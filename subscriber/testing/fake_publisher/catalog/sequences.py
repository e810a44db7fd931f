"""The queries of ``subscriber sequences``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend.results import BOOL, INT8, NAME, OID, TEXT, Result, known, literals, result

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["QUERIES"]

_OID: Final = re.compile(r"SELECT ([0-9]+) AS oid")
_LARGEST: Final = 2**63 - 1


def _published(session: Session, values: Mapping[str, str]) -> Result:
    publications = session.publisher.publications
    found = any(publications[name].all_sequences for name in literals(values["names"]) if name in publications)
    return result({"relid": OID}, [(each.oid,) for each in session.publisher.sequences.values()] if found else [])


def _find(session: Session, values: Mapping[str, str]) -> Result:
    wanted = set(map(int, values["oids"].split(",")))
    rows = [
        (each.oid, name.namespace, name.name, True, None, None, None, None, True, False)
        for name, each in session.publisher.sequences.items()
        if each.oid in wanted
    ]
    names = {"oid": OID, "nspname": NAME, "relname": NAME, "readable": BOOL}
    uses = dict.fromkeys(("table_namespace", "table_name", "attname", "owns"), TEXT)
    return result(names | uses | {"published": BOOL, "whole": BOOL}, rows)


def _read(session: Session, values: Mapping[str, str]) -> Result:
    wanted = set(map(int, _OID.findall(values["values"])))
    rows = [
        (each.oid, "bigint", 1, 1, 1, _LARGEST, 1, False, each.last_value, each.is_called)
        for each in session.publisher.sequences.values()
        if each.oid in wanted
    ]
    numbers = ("seqstart", "seqincrement", "seqmin", "seqmax", "seqcache")
    fields = {"oid": OID, "type": TEXT} | dict.fromkeys(numbers, INT8) | {"seqcycle": BOOL, "last_value": INT8, "is_called": BOOL}
    return result(fields, rows)


QUERIES: Final = (
    known("SELECT DISTINCT gps.relid FROM pg_catalog.pg_publication AS p, ... WHERE p.pubname IN ({names})", _published),
    known("WITH extended AS (SELECT d.objid ...uses AS (... OR c.oid IN ({oids}) AS published...", _find),
    known("SELECT v.oid, pg_catalog.format_type(s.seqtypid, NULL), ... FROM ({values}) AS v JOIN pg_catalog.pg_sequence AS s ...", _read),
)
