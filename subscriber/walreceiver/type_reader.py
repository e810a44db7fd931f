"""Read types that are not built in from the publisher's catalog."""

from __future__ import annotations

import json
from collections.abc import Iterable

from subscriber.types.pg_type import Attribute, TypeFact, TypeKind
from subscriber.types.registry import TypeRegistry
from subscriber.walreceiver.session import Row, Session

__all__ = ["type_facts"]

# a type is an array if it is the ``typarray`` of another one, in every version; ``rngmultitypid`` exists from 14 on
_QUERY = """
    SELECT t.oid, n.nspname, t.typname, CASE WHEN item.oid IS NOT NULL THEN 'a' ELSE t.typtype END, t.typtypmod, t.typdelim,
           COALESCE(CASE WHEN item.oid IS NOT NULL THEN item.oid
                         WHEN t.typtype = 'd' THEN t.typbasetype
                         WHEN t.typtype = 'r' THEN r.rngsubtype
                         WHEN t.typtype = 'm' THEN (
                             SELECT m.rngtypid FROM pg_catalog.pg_range AS m
                              WHERE (pg_catalog.to_jsonb(m) ->> 'rngmultitypid')::pg_catalog.oid = t.oid)
                    END, 0),
           (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(a.attname, a.atttypid::pg_catalog.int8, a.atttypmod) ORDER BY a.attnum)
              FROM pg_catalog.pg_attribute AS a
             WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped),
           (SELECT pg_catalog.json_agg(e.enumlabel ORDER BY e.enumsortorder)
              FROM pg_catalog.pg_enum AS e
             WHERE e.enumtypid = t.oid)
      FROM pg_catalog.pg_type AS t
      JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
      LEFT JOIN pg_catalog.pg_type AS item ON item.oid = t.typelem AND item.typarray = t.oid
      LEFT JOIN pg_catalog.pg_range AS r ON r.rngtypid = t.oid
     WHERE t.oid IN ({oids}) AND t.typtype <> 'p'
"""


async def type_facts(session: Session, oids: Iterable[int]) -> tuple[TypeFact, ...]:
    """Return the rows of these types, and of their parts, by oid. Built-in types are left out.

    Types that do not exist (any more) are left out.

    Args:
        session: to the publisher; may be a walsender.
        oids: of types.
    """
    registry = TypeRegistry()
    asked: set[int] = set()
    wanted = set(oids)
    # the parts of a type become known step by step: an array of a domain of a composite type of ...
    while missing := registry.unknown(wanted) - asked:
        asked |= missing
        rows = await session.execute(_QUERY.format(oids=", ".join(map(str, sorted(missing)))))
        registry.add(map(_fact, rows))
    return registry.facts_of(wanted)


def _fact(row: Row) -> TypeFact:
    oid, namespace, name, kind, modifier, delimiter, element, attributes, labels = row
    return TypeFact(
        int(oid or 0),
        namespace or "",
        name or "",
        TypeKind(kind or "b"),
        int(element or 0),
        int(modifier or -1),
        delimiter or ",",
        tuple(Attribute(*attribute) for attribute in json.loads(attributes or "[]")),
        tuple(json.loads(labels or "[]")),
    )
