"""Read target tables from the system catalogs: any number of tables with the same few queries.

The queries run in a separate session. They take no locks on the tables, so they never wait for an open transaction of the apply session.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from subscriber.errors import RelationError
from subscriber.interfaces import TableName
from subscriber.sinks.postgres.session.catalog_reader import CatalogQueries
from subscriber.sinks.postgres.tables.fingerprint import FINGERPRINT, PLAIN
from subscriber.sinks.postgres.tables.relation_mapping import CREATE_HINT, STREAM_HINT, TargetColumn, TargetTable, missing_table
from subscriber.waits import moved

__all__ = ["read_table", "read_tables", "require_table"]

_EXISTS: Final = """
SELECT c.oid::int8 AS oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = $2
"""

# $1, $2: schemas and names. $3: apply as the table's owner. $4: the subscription's owner, NULL if that is the session's own role.
# The fingerprint is read by the first query: if a table is altered before the later queries, the fingerprint differs at the check.
_TABLES: Final = f"""
WITH wanted AS MATERIALIZED (
    SELECT c.oid FROM ROWS FROM (pg_catalog.unnest($1::text[]::name[]), pg_catalog.unnest($2::text[]::name[])) AS given(nspname, relname)
    JOIN pg_catalog.pg_namespace n ON n.nspname = given.nspname
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = given.relname
), referencing AS MATERIALIZED (
    SELECT x.confrelid, pg_catalog.array_agg(pg_catalog.json_build_array(fn.nspname, f.relname)::text) AS tables
    FROM pg_catalog.pg_constraint x
    JOIN pg_catalog.pg_class f ON f.oid = x.conrelid
    JOIN pg_catalog.pg_namespace fn ON fn.oid = f.relnamespace
    WHERE x.contype = 'f' AND x.conrelid <> x.confrelid AND x.confrelid IN (SELECT oid FROM wanted)
    GROUP BY x.confrelid
)
SELECT n.nspname::text AS namespace, c.relname::text AS name, c.oid::int8 AS oid, {FINGERPRINT} AS fingerprint,
       {PLAIN} AS plain, c.relkind::text AS kind,
       nullif(CASE WHEN $3 THEN o.rolname ELSE coalesce($4::text::name, current_user) END, current_user)::text AS role,
       CASE WHEN $3 AND NOT pg_catalog.pg_has_role($4::text::name, o.oid, 'MEMBER') THEN $4::text END AS barred,
       CASE WHEN c.relrowsecurity AND NOT (r.rolsuper OR r.rolbypassrls)
                 AND (c.relforcerowsecurity OR NOT pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE'))
            THEN r.rolname::text END AS rls_user,
       CASE WHEN c.relhasrules AND c.relkind IN ('r', 'p') THEN
            (SELECT min(w.rulename::text) FROM pg_catalog.pg_rewrite w WHERE w.ev_class = c.oid AND w.ev_enabled IN ('A', 'R')) END AS rule,
       coalesce(x.tables, '{{}}') AS referenced_by,
       CASE WHEN c.relispartition THEN pg_catalog.pg_partition_root(c.oid) ELSE c.oid END::int8 AS tree,
       c.relkind = 'r' AND NOT c.relispartition AND c.relchecks = 0 AND pg_catalog.current_setting('server_encoding') = 'UTF8'
       AND EXISTS (SELECT FROM pg_catalog.pg_am m WHERE m.oid = c.relam AND m.amname = 'heap')
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> '')
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_index i
                       JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid
                       JOIN pg_catalog.pg_am m ON m.oid = ic.relam
                       WHERE i.indrelid = c.oid AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL
                             OR m.amname NOT IN ('btree', 'hash', 'brin') OR 16384 <= ANY (i.indclass::oid[]))) AS unchecked
FROM wanted
JOIN pg_catalog.pg_class c ON c.oid = wanted.oid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_roles o ON o.oid = c.relowner
JOIN pg_catalog.pg_roles r ON r.rolname = CASE WHEN $3 THEN o.rolname ELSE coalesce($4::text::name, current_user) END
LEFT JOIN referencing x ON x.confrelid = c.oid
"""  # noqa: S608 (a constant)

# a function that d (pg_depend) refers to, itself or through an operator; built-in functions are not in pg_depend
_CALLED: Final = """
    f.oid = CASE d.refclassid WHEN 'pg_catalog.pg_proc'::pg_catalog.regclass THEN d.refobjid
            WHEN 'pg_catalog.pg_operator'::pg_catalog.regclass
            THEN (SELECT o.oprcode FROM pg_catalog.pg_operator o WHERE o.oid = d.refobjid) END
"""
_TEXT_ARRAY: Final = 1009

# A column's type is divided (domains, arrays, composites) down to types that are no domain, array or composite. The equality operator is
# that of the default btree or hash operator class, as in PostgreSQL's type cache; if a part has none, the column has none.
# An array is an element of no other array. It is cast from text: without a row in pg_cast, this cast calls the input function.
# With -1, its name is never that of a shorter type: "character" without a length means character(1), "bit" means bit(1).
# watching: types with a domain's default or CHECK constraint that could see rows of tables.
# oid[] and text[] are the arrays that asyncpg knows; for another one, it would first query the catalogs about it.
_COLUMNS: Final = f"""
WITH RECURSIVE given AS (
    SELECT a.attrelid, a.attnum, a.attname, a.atttypid, a.atttypmod, a.attcollation, a.attgenerated, a.attidentity,
           a.attnotnull
    FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = ANY ($1::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
), part(root, typ, whole) AS (
    SELECT DISTINCT g.atttypid, g.atttypid, true FROM given g
  UNION
    SELECT p.root, inner_type.typ, p.whole AND t.typtype = 'd'
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
    SELECT p.root, p.whole, operator.name
    FROM part p
    JOIN pg_catalog.pg_type t ON t.oid = p.typ AND t.typtype NOT IN ('d', 'c')
         AND NOT EXISTS (SELECT FROM pg_catalog.pg_type e WHERE e.oid = t.typelem AND e.typarray = t.oid)
    LEFT JOIN LATERAL (
        SELECT found.name
        FROM pg_catalog.pg_opclass k
        JOIN pg_catalog.pg_am am ON am.oid = k.opcmethod AND am.amname IN ('btree', 'hash')
        -- OFFSET 0: for the few classes that fit, not for all of them
        CROSS JOIN LATERAL (
            SELECT pg_catalog.format('OPERATOR(%I.%s)', n.nspname, op.oprname) AS name
            FROM pg_catalog.pg_amop m
            JOIN pg_catalog.pg_operator op ON op.oid = m.amopopr
            JOIN pg_catalog.pg_namespace n ON n.oid = op.oprnamespace
            WHERE m.amopfamily = k.opcfamily AND m.amoplefttype = k.opcintype AND m.amoprighttype = k.opcintype
              AND m.amopstrategy = CASE am.amname WHEN 'btree' THEN 3 ELSE 1 END
            OFFSET 0
        ) AS found
        WHERE k.opcdefault
          AND (k.opcintype = t.oid
               OR k.opcintype = CASE t.typtype WHEN 'e' THEN 'anyenum'::regtype WHEN 'r' THEN 'anyrange'::regtype
                                WHEN 'm' THEN pg_catalog.to_regtype('anymultirange') END
               OR EXISTS (SELECT FROM pg_catalog.pg_cast x WHERE x.castsource = t.oid AND x.casttarget = k.opcintype
                          AND x.castmethod = 'b' AND x.castcontext = 'i'))
        ORDER BY k.opcintype = t.oid DESC, am.amname LIMIT 1
    ) AS operator ON true
), watching AS MATERIALIZED (
    SELECT DISTINCT p.root FROM part p
    JOIN (
        SELECT t.oid AS typ, t.tableoid, t.oid FROM pg_catalog.pg_type t WHERE t.typtype = 'd' AND t.typdefaultbin IS NOT NULL
        UNION ALL
        SELECT k.contypid, k.tableoid, k.oid FROM pg_catalog.pg_constraint k WHERE k.contypid <> 0
    ) AS e ON e.typ = p.typ
    JOIN pg_catalog.pg_depend d ON d.classid = e.tableoid AND d.objid = e.oid
    JOIN pg_catalog.pg_proc f ON f.provolatile <> 'i' AND {_CALLED}
), compared AS MATERIALIZED (
    SELECT l.root, CASE WHEN pg_catalog.bool_and(l.name IS NOT NULL)
                        THEN coalesce(max(l.name) FILTER (WHERE l.whole), 'OPERATOR(pg_catalog.=)') END AS equals
    FROM leaf l GROUP BY l.root
)
SELECT g.attrelid::int8 AS relid, g.attname::text AS name, g.atttypid::int8 AS type_oid,
       pg_catalog.format_type(g.atttypid, g.atttypmod) AS type_name, g.attgenerated <> '' AS generated,
       g.attidentity = 'a' AS identity_always, o.equals,
       CASE WHEN w.root IS NOT NULL THEN 0 WHEN t.typarray <> 0 THEN t.typarray::int8 WHEN x.cast IS NOT NULL THEN {_TEXT_ARRAY} ELSE 0 END
           AS array,
       CASE WHEN t.typarray <> 0 THEN t.typdelim::text ELSE ',' END AS delimiter, x.cast,
       NOT EXISTS (SELECT FROM pg_catalog.pg_collation l WHERE l.oid = g.attcollation AND NOT l.collisdeterministic) AS deterministic,
       g.atttypmod AS modifier, g.attnotnull AS not_null, g.attidentity <> '' AS identity, g.attnum AS number
FROM given g
JOIN pg_catalog.pg_type t ON t.oid = g.atttypid
LEFT JOIN compared o ON o.root = g.atttypid
LEFT JOIN watching w ON w.root = g.atttypid
LEFT JOIN LATERAL (
    SELECT pg_catalog.format_type(t.oid, -1) AS cast FROM pg_catalog.pg_type e WHERE e.oid = t.typelem AND e.typarray = t.oid
    AND NOT EXISTS (SELECT FROM pg_catalog.pg_cast c WHERE c.castsource = 'pg_catalog.text'::pg_catalog.regtype AND c.casttarget = t.oid)
) AS x ON true
ORDER BY g.attrelid, g.attnum
"""  # noqa: S608 (a constant)

# watched, other_unique: see TargetTable.
# triggered: a BEFORE ROW trigger that fires for replicated changes (tgtype: 1 for each row, 2 before), of the table or of a partition.
# operators: with the collation of the index if its column has another one.
# columns: the replica identity index, or the primary key unless it is deferrable; of the table, or of all leaves of a partitioned table.
# The query does not use pg_partition_tree(), which takes locks, and would wait for ever for a TRUNCATE of the apply session.
_KEYS: Final = f"""
WITH RECURSIVE tree(root, oid) AS (
    SELECT root, root FROM pg_catalog.unnest($1::oid[]) AS root
  UNION ALL
    SELECT t.root, c.oid FROM tree AS t
    JOIN pg_catalog.pg_inherits h ON h.inhparent = t.oid
    JOIN pg_catalog.pg_class c ON c.oid = h.inhrelid AND c.relispartition
), tables AS (
    SELECT t.root, c.oid, c.relkind, c.relreplident, c.oid = t.root AS itself
    FROM tree AS t JOIN pg_catalog.pg_class c ON c.oid = t.oid AND (c.relkind <> 'p' OR c.oid = t.root)
)
SELECT t.root::int8 AS relid, t.itself, k.columns, k.operators,
       EXISTS (SELECT FROM pg_catalog.pg_trigger g
               WHERE g.tgrelid = t.oid AND g.tgenabled IN ('R', 'A') AND g.tgtype & 3 = 3) AS triggered,
       EXISTS (SELECT FROM pg_catalog.pg_trigger g WHERE g.tgrelid = t.oid AND g.tgenabled IN ('R', 'A'))
       OR t.relkind = 'f'
       OR EXISTS (
           SELECT FROM (
               SELECT a.tableoid, a.oid FROM pg_catalog.pg_attrdef a WHERE a.adrelid = t.oid
               UNION ALL
               SELECT k.tableoid, k.oid FROM pg_catalog.pg_constraint k WHERE k.conrelid = t.oid AND k.contype = 'c'
           ) AS e
           JOIN pg_catalog.pg_depend d ON d.classid = e.tableoid AND d.objid = e.oid
           JOIN pg_catalog.pg_proc f ON f.provolatile <> 'i' AND {_CALLED}
       )
       -- pg_depend does not have functions of the system
       OR EXISTS (
           SELECT FROM pg_catalog.pg_attrdef a
           JOIN pg_catalog.pg_proc f ON f.oid IN ('pg_catalog.currval(regclass)'::pg_catalog.regprocedure,
                                                  'pg_catalog.lastval()'::pg_catalog.regprocedure)
           WHERE a.adrelid = t.oid AND pg_catalog.strpos(a.adbin::pg_catalog.text, pg_catalog.format(':funcid %s ', f.oid::int8)) > 0
       ) AS watched,
       EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = t.oid AND (i.indisunique OR i.indisexclusion)
               AND i.indexrelid IS DISTINCT FROM k.indexrelid) AS other_unique
FROM tables t
LEFT JOIN LATERAL (
    SELECT i.indexrelid, pg_catalog.array_agg(a.attname::text ORDER BY u.place) AS columns,
           pg_catalog.array_agg(operator.name ORDER BY u.place) AS operators
    FROM pg_catalog.pg_index i
    JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid
    JOIN pg_catalog.pg_am am ON am.oid = ic.relam
    CROSS JOIN LATERAL ROWS FROM (
        pg_catalog.unnest(i.indkey::int2[]), pg_catalog.unnest(i.indclass::oid[]), pg_catalog.unnest(i.indcollation::oid[])
    ) WITH ORDINALITY AS u(attnum, class, compared, place)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = u.attnum
    JOIN pg_catalog.pg_opclass oc ON oc.oid = u.class
    LEFT JOIN LATERAL (
        SELECT pg_catalog.concat(
            (SELECT pg_catalog.format('COLLATE %I.%I ', ln.nspname, l.collname)
             FROM pg_catalog.pg_collation l JOIN pg_catalog.pg_namespace ln ON ln.oid = l.collnamespace
             WHERE l.oid = u.compared AND u.compared <> a.attcollation),
            pg_catalog.format('OPERATOR(%I.%s)', n.nspname, op.oprname)
        ) AS name
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
"""  # noqa: S608 (a constant)


async def read_table(
    reader: CatalogQueries, name: TableName, *, as_owner: bool, hint: str = CREATE_HINT, has_columns: bool = True
) -> TargetTable:
    """Read one table.

    Args:
        reader: the session that reads the catalogs.
        name: name of the table.
        as_owner: whether changes are made as the table's owner.
        hint: hint of the error if there is no such relation.
        has_columns: whether its columns and its key are read, too. Their queries cost the server most of the work.

    Raises:
        RelationError: there is no such relation.
        TargetUnavailable: the connection was lost.
    """
    _require_text(name)
    found = await read_tables(reader, [name], as_owner=as_owner, has_columns=has_columns)
    if name not in found:
        raise missing_table(name, hint)
    return found[name]


async def read_tables(
    reader: CatalogQueries, names: Collection[TableName], *, as_owner: bool, has_columns: bool = True
) -> Mapping[TableName, TargetTable]:
    """Read tables. Arguments and errors are those of :func:`read_table`, but tables that do not exist are left out."""
    encodable = [name for name in names if _is_text(name)]
    rows = await reader.fetch(_TABLES, [name.namespace for name in encodable], [name.name for name in encodable], as_owner, reader.owner)
    columns: dict[int, tuple[TargetColumn, ...]] = {}
    keys: dict[int, list[dict[str, Any]]] = {}
    if has_columns:
        found = _by_table(await reader.fetch(_COLUMNS, [row["oid"] for row in rows]))
        columns = {oid: tuple(TargetColumn(**row) for row in each) for oid, each in found.items()}
        keys = _by_table(await reader.fetch(_KEYS, [row["oid"] for row in rows if row["kind"] in {"r", "p"}]))
    moved()
    tables = (_table(row, columns.get(row["oid"], ()), keys.get(row["oid"])) for row in rows)
    return {table.name: table for table in tables}


def _by_table(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.pop("relid"), []).append(row)
    return found


def _table(row: dict[str, Any], columns: tuple[TargetColumn, ...], keys: list[dict[str, Any]] | None) -> TargetTable:
    key, key_unique = ((), True) if keys is None else _key(keys, columns)
    referenced_by = frozenset(TableName(*json.loads(table)) for table in row["referenced_by"])
    return TargetTable(
        TableName(row["namespace"], row["name"]),
        row["oid"],
        (row["oid"], row["fingerprint"], row["plain"]),
        row["kind"],
        row["role"],
        row["rls_user"],
        columns,
        key,
        key_unique,
        referenced_by,
        row["rule"],
        row["barred"],
        triggered=any(part["triggered"] for part in keys or ()),
        # without an array type: maybe a domain with such a function
        watched=any(part["watched"] for part in keys or ()) or any(column.array == 0 for column in columns),
        other_unique=any(part["other_unique"] for part in keys or ()),
        tree=row["tree"],
        unchecked=row["unchecked"],
    )


async def require_table(reader: CatalogQueries, name: TableName) -> int:
    """Return the oid of a relation for which a change has arrived.

    Raises:
        RelationError: the relation does not exist.
        TargetUnavailable: the connection was lost.
    """
    _require_text(name)
    found = await reader.fetch(_EXISTS, name.namespace, name.name)
    moved()
    if not found:
        raise missing_table(name, STREAM_HINT)
    return int(found[0]["oid"])


def _require_text(name: TableName) -> None:
    if not _is_text(name):
        raise RelationError("the publisher sent a relation name that is not UTF-8", hint="rename it")


def _is_text(name: TableName) -> bool:
    try:
        f"{name}".encode()
    except UnicodeEncodeError:
        return False
    return True


def _key(rows: list[dict[str, Any]], columns: tuple[TargetColumn, ...]) -> tuple[tuple[tuple[str, str | None], ...], bool]:
    default = {column.name: column.equals for column in columns}

    def pairs(row: dict[str, Any]) -> tuple[tuple[str, str | None], ...]:
        return tuple((name, operator or default[name]) for name, operator in zip(row["columns"] or (), row["operators"] or (), strict=True))

    itself = pairs(next(row for row in rows if row["itself"]))
    leaves = [pairs(row) for row in rows if not row["itself"]]
    if itself or not leaves:
        return itself, True
    # a partitioned table without a key, whose partitions all have the same key: PostgreSQL uses the key of the partition
    names = {frozenset(name for name, _ in leaf) for leaf in leaves}
    return (leaves[0], False) if len(names) == 1 else ((), True)
