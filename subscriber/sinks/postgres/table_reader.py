"""Reads the target's side of a relation from the system catalogs.

Read through a session of its own: it takes no locks on the tables, so an open transaction of the apply session is never waited for.
"""

from __future__ import annotations

import json
from typing import Any, Final

from subscriber.abc import TableName
from subscriber.errors import RelationError
from subscriber.sinks.postgres.fingerprint import FINGERPRINT
from subscriber.sinks.postgres.reading import CatalogReader
from subscriber.sinks.postgres.relation import TargetColumn, TargetTable, missing_table

__all__ = ["read_table", "require_table"]

_EXISTS: Final = """
SELECT c.oid::int8 AS oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = $2
"""

# $3: apply as the table's owner. The fingerprint comes with the first query: what changes before the others makes it differ later.
_TABLE: Final = f"""
SELECT c.oid::int8 AS oid, {FINGERPRINT} AS fingerprint, c.relkind::text AS kind,
       CASE WHEN $3 AND o.rolname <> current_user THEN o.rolname::text END AS role,
       CASE WHEN c.relrowsecurity AND NOT (r.rolsuper OR r.rolbypassrls)
                 AND (c.relforcerowsecurity OR NOT pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE'))
            THEN r.rolname::text END AS rls_user,
       CASE WHEN c.relhasrules AND c.relkind IN ('r', 'p') THEN
            (SELECT min(w.rulename::text) FROM pg_catalog.pg_rewrite w WHERE w.ev_class = c.oid AND w.ev_enabled IN ('A', 'R')) END AS rule,
       ARRAY(SELECT pg_catalog.json_build_array(fn.nspname, f.relname)::text
             FROM pg_catalog.pg_constraint x
             JOIN pg_catalog.pg_class f ON f.oid = x.conrelid
             JOIN pg_catalog.pg_namespace fn ON fn.oid = f.relnamespace
             WHERE x.contype = 'f' AND x.confrelid = c.oid AND x.conrelid <> c.oid) AS referenced_by
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_roles o ON o.oid = c.relowner
JOIN pg_catalog.pg_roles r ON r.rolname = CASE WHEN $3 THEN o.rolname ELSE current_user END
WHERE n.nspname = $1 AND c.relname = $2
"""  # noqa: S608 (a constant)

# A column's type is taken apart (domains, arrays, composites) down to types that have an operator class of their own or not. The
# operator is that of the default btree or hash class, as native's type cache finds it; if a part has none, the whole has none.
_COLUMNS: Final = """
WITH RECURSIVE part(attnum, typ, whole) AS (
    SELECT a.attnum, a.atttypid, true FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = $1::int8::oid AND a.attnum > 0 AND NOT a.attisdropped
  UNION
    SELECT p.attnum, inner_type.typ, p.whole AND t.typtype = 'd'
    FROM part p
    JOIN pg_catalog.pg_type t ON t.oid = p.typ
    CROSS JOIN LATERAL (
        SELECT t.typbasetype AS typ WHERE t.typtype = 'd'
        UNION ALL
        SELECT e.oid FROM pg_catalog.pg_type e WHERE e.oid = t.typelem AND e.typarray = t.oid
        UNION ALL
        SELECT f.atttypid FROM pg_catalog.pg_attribute f
        WHERE t.typtype = 'c' AND f.attrelid = t.typrelid AND f.attnum > 0 AND NOT f.attisdropped
    ) AS inner_type
), leaf AS (
    SELECT p.attnum, p.whole, p.typ, operator.name
    FROM part p
    JOIN pg_catalog.pg_type t ON t.oid = p.typ AND t.typtype NOT IN ('d', 'c')
         AND NOT EXISTS (SELECT FROM pg_catalog.pg_type e WHERE e.oid = t.typelem AND e.typarray = t.oid)
    LEFT JOIN LATERAL (
        SELECT pg_catalog.format('OPERATOR(%I.%s)', n.nspname, op.oprname) AS name
        FROM pg_catalog.pg_opclass k
        JOIN pg_catalog.pg_am am ON am.oid = k.opcmethod AND am.amname IN ('btree', 'hash')
        JOIN pg_catalog.pg_amop m ON m.amopfamily = k.opcfamily AND m.amoplefttype = k.opcintype AND m.amoprighttype = k.opcintype
             AND m.amopstrategy = CASE am.amname WHEN 'btree' THEN 3 ELSE 1 END
        JOIN pg_catalog.pg_operator op ON op.oid = m.amopopr
        JOIN pg_catalog.pg_namespace n ON n.oid = op.oprnamespace
        WHERE k.opcdefault
          AND (k.opcintype = t.oid
               OR k.opcintype = CASE t.typtype WHEN 'e' THEN 'anyenum'::regtype WHEN 'r' THEN 'anyrange'::regtype
                                WHEN 'm' THEN pg_catalog.to_regtype('anymultirange') END
               OR EXISTS (SELECT FROM pg_catalog.pg_cast x WHERE x.castsource = t.oid AND x.casttarget = k.opcintype
                          AND x.castmethod = 'b' AND x.castcontext = 'i'))
        ORDER BY k.opcintype = t.oid DESC, am.amname LIMIT 1
    ) AS operator ON true
)
SELECT a.attname::text AS name, a.atttypid::int8 AS type_oid, pg_catalog.format_type(a.atttypid, a.atttypmod) AS type_name,
       a.attgenerated <> '' AS generated, a.attidentity = 'a' AS identity_always,
       (SELECT CASE WHEN pg_catalog.bool_and(l.name IS NOT NULL)
                    THEN coalesce(max(l.name) FILTER (WHERE l.whole), 'OPERATOR(pg_catalog.=)') END
        FROM leaf l WHERE l.attnum = a.attnum) AS equals
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = $1::int8::oid AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""

# The replica identity index, or the primary key unless it is deferrable; of the table itself, or of all leaves of a partitioned one.
# Not pg_partition_tree(): it takes locks, and would wait for ever for a TRUNCATE of our own.
_KEYS: Final = """
WITH RECURSIVE tree(oid) AS (
    SELECT $1::int8::oid
  UNION ALL
    SELECT c.oid FROM tree AS t
    JOIN pg_catalog.pg_inherits h ON h.inhparent = t.oid
    JOIN pg_catalog.pg_class c ON c.oid = h.inhrelid AND c.relispartition
), tables AS (
    SELECT c.oid, c.relreplident, c.oid = $1::int8::oid AS itself
    FROM tree AS t JOIN pg_catalog.pg_class c ON c.oid = t.oid AND (c.relkind <> 'p' OR c.oid = $1::int8::oid)
)
SELECT t.oid::int8 AS oid, t.itself, k.columns, k.operators
FROM tables t
LEFT JOIN LATERAL (
    SELECT pg_catalog.array_agg(a.attname::text ORDER BY u.place) AS columns,
           pg_catalog.array_agg(operator.name ORDER BY u.place) AS operators
    FROM pg_catalog.pg_index i
    JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid
    JOIN pg_catalog.pg_am am ON am.oid = ic.relam
    CROSS JOIN LATERAL ROWS FROM (pg_catalog.unnest(i.indkey::int2[]), pg_catalog.unnest(i.indclass::oid[]))
         WITH ORDINALITY AS u(attnum, class, place)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = u.attnum
    JOIN pg_catalog.pg_opclass oc ON oc.oid = u.class
    LEFT JOIN LATERAL (
        SELECT pg_catalog.format('OPERATOR(%I.%s)', n.nspname, op.oprname) AS name
        FROM pg_catalog.pg_amop m
        JOIN pg_catalog.pg_operator op ON op.oid = m.amopopr
        JOIN pg_catalog.pg_namespace n ON n.oid = op.oprnamespace
        WHERE am.amname = 'btree' AND m.amopfamily = oc.opcfamily AND m.amopstrategy = 3
          AND m.amoplefttype = oc.opcintype AND m.amoprighttype = oc.opcintype
    ) AS operator ON true
    WHERE i.indrelid = t.oid AND i.indisvalid AND i.indisunique AND i.indimmediate AND i.indpred IS NULL
      AND u.place <= i.indnkeyatts AND (i.indisprimary OR (i.indisreplident AND t.relreplident = 'i'))
    GROUP BY i.indexrelid, i.indisreplident
    ORDER BY i.indisreplident AND t.relreplident = 'i' DESC LIMIT 1
) AS k ON true
"""


async def read_table(reader: CatalogReader, name: TableName, *, as_owner: bool) -> TargetTable:
    """Read one table.

    Args:
        reader: the session to read through.
        name: of the table.
        as_owner: whether changes will be made as the table's owner.

    Raises:
        RelationError: there is no such relation.
        TargetUnavailable: the connection was lost.
    """
    _require_text(name)
    found = await reader.fetch(_TABLE, name.namespace, name.name, as_owner)
    if not found:
        raise missing_table(name)
    oid, kind = found[0]["oid"], found[0]["kind"]
    columns = tuple(TargetColumn(**row) for row in await reader.fetch(_COLUMNS, oid))
    key, key_unique = _key(await reader.fetch(_KEYS, oid), columns) if kind in {"r", "p"} else ((), True)
    referenced_by = frozenset(TableName(*json.loads(table)) for table in found[0]["referenced_by"])
    fingerprint = (oid, found[0]["fingerprint"])
    return TargetTable(
        name, oid, fingerprint, kind, found[0]["role"], found[0]["rls_user"], columns, key, key_unique, referenced_by, found[0]["rule"]
    )


async def require_table(reader: CatalogReader, name: TableName) -> int:
    """See that there is such a relation; return its oid.

    Raises:
        RelationError: there is none.
        TargetUnavailable: the connection was lost.
    """
    _require_text(name)
    found = await reader.fetch(_EXISTS, name.namespace, name.name)
    if not found:
        raise missing_table(name)
    return int(found[0]["oid"])


def _require_text(name: TableName) -> None:
    try:
        f"{name}".encode()
    except UnicodeEncodeError:
        raise RelationError("the publisher sent a relation name that is not UTF-8", hint="rename it") from None


def _key(rows: list[dict[str, Any]], columns: tuple[TargetColumn, ...]) -> tuple[tuple[tuple[str, str | None], ...], bool]:
    default = {column.name: column.equals for column in columns}

    def pairs(row: dict[str, Any]) -> tuple[tuple[str, str | None], ...]:
        return tuple((name, operator or default[name]) for name, operator in zip(row["columns"] or (), row["operators"] or (), strict=True))

    itself = pairs(next(row for row in rows if row["itself"]))
    leaves = [pairs(row) for row in rows if not row["itself"]]
    if itself or not leaves:
        return itself, True
    # a partitioned table without a key whose partitions all have the same one: native looks at the partition's
    names = {frozenset(name for name, _ in leaf) for leaf in leaves}
    return (leaves[0], False) if len(names) == 1 else ((), True)
