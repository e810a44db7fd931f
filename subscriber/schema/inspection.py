"""Reads the schema of tables from PostgreSQL's system catalog."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.interfaces import Query, TableName
from subscriber.interfaces.table_schema import ColumnSchema, ConstraintSchema, DatabaseSchema, IndexSchema, SequenceSchema, TableSchema
from subscriber.protocol.quoting import quote_literal

__all__ = ["SchemaScope", "inspect"]

_NAMES: Final = """
(SELECT json_agg(a.attname ORDER BY k.number) FROM pg_catalog.unnest({}) WITH ORDINALITY AS k (attnum, number)
   JOIN pg_catalog.pg_attribute AS a ON a.attrelid = {} AND a.attnum = k.attnum)::text
"""
_COLUMNS: Final = """
SELECT n.nspname::text, c.relname::text, c.relreplident::text, pg_catalog.obj_description(c.oid, 'pg_class'), a.attname::text,
       pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull::text, pg_catalog.pg_get_expr(d.adbin, d.adrelid), a.attidentity::text,
       a.attgenerated::text,
       CASE WHEN a.attcollation <> t.typcollation
            THEN pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(co.collname) END,
       (SELECT json_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_catalog.pg_enum AS e WHERE e.enumtypid = t.oid)::text,
       pg_catalog.col_description(c.oid, a.attnum)
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
  LEFT JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum
  LEFT JOIN pg_catalog.pg_collation AS co ON co.oid = a.attcollation
  LEFT JOIN pg_catalog.pg_namespace AS cn ON cn.oid = co.collnamespace
 WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND {}
 ORDER BY n.nspname, c.relname, a.attnum
"""
_CONSTRAINTS: Final = """
SELECT n.nspname::text, c.relname::text, o.conname::text, o.contype::text, pg_catalog.pg_get_constraintdef(o.oid), {conkey},
       fn.nspname::text, f.relname::text, {confkey}, o.confdeltype::text, o.confupdtype::text
  FROM pg_catalog.pg_constraint AS o JOIN pg_catalog.pg_class AS c ON c.oid = o.conrelid
  JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_catalog.pg_class AS f ON f.oid = o.confrelid LEFT JOIN pg_catalog.pg_namespace AS fn ON fn.oid = f.relnamespace
 WHERE o.contype IN ('p', 'u', 'f', 'c', 'x') AND o.conparentid = 0 AND o.conislocal AND {}
 ORDER BY o.conname
"""
_INDEXES: Final = """
SELECT n.nspname::text, c.relname::text, x.relname::text, pg_catalog.quote_ident(x.relname), pg_catalog.pg_get_indexdef(i.indexrelid),
       i.indisunique::text, i.indisvalid::text,
       CASE WHEN i.indexprs IS NULL AND i.indpred IS NULL AND am.amname = 'btree' THEN {keys} END
  FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.indrelid
  JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_class AS x ON x.oid = i.indexrelid JOIN pg_catalog.pg_am AS am ON am.oid = x.relam
 WHERE NOT x.relispartition AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint AS o WHERE o.conindid = i.indexrelid AND o.contype IN ('p', 'u', 'x')) AND {}
 ORDER BY x.relname
"""
_SEQUENCES: Final = """
SELECT sn.nspname::text, s.relname::text,
       pg_catalog.format('AS %s INCREMENT %s MINVALUE %s MAXVALUE %s START %s CACHE %s %s', pg_catalog.format_type(q.seqtypid, NULL),
                         q.seqincrement, q.seqmin, q.seqmax, q.seqstart, q.seqcache, CASE WHEN q.seqcycle THEN 'CYCLE' ELSE 'NO CYCLE' END),
       n.nspname::text, c.relname::text, a.attname::text
  FROM pg_catalog.pg_sequence AS q JOIN pg_catalog.pg_class AS s ON s.oid = q.seqrelid
  JOIN pg_catalog.pg_namespace AS sn ON sn.oid = s.relnamespace
  LEFT JOIN pg_catalog.pg_depend AS d ON d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = s.oid
   AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0
  LEFT JOIN pg_catalog.pg_class AS c ON c.oid = d.refobjid LEFT JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = d.refobjsubid
 WHERE s.relpersistence <> 't' AND ({} OR {})
 ORDER BY sn.nspname, s.relname
"""
_NOT_OURS: Final = "{0}.nspname NOT IN ('pg_catalog', 'information_schema', 'subscriber') AND {0}.nspname !~ '^pg_'"
_NOT_EXTENSION: Final = (
    "NOT EXISTS (SELECT FROM pg_catalog.pg_depend AS own WHERE own.classid = 'pg_catalog.pg_class'::pg_catalog.regclass"
    " AND own.objid = {}.oid AND own.deptype = 'e')"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaScope:
    """Which tables and sequences are read.

    Attributes:
        tables: these tables, and the sequences that their columns own; or names of sequences.
        schemas: all tables and sequences of these schemas.
        everything: all of the database, without those of extensions.
    """

    tables: Collection[TableName] = ()
    schemas: Collection[str] = ()
    everything: bool = False

    def condition(self, namespace: str, relation: str) -> str:
        """The condition on the aliases of pg_namespace and pg_class."""
        found = []
        if self.tables:
            rows = ", ".join(f"({quote_literal(each.namespace)}, {quote_literal(each.name)})" for each in sorted(self.tables))
            found.append(f"({namespace}.nspname, {relation}.relname) IN ({rows})")
        if self.schemas:
            found.append(f"{namespace}.nspname IN ({', '.join(map(quote_literal, self.schemas))})")
        if self.everything:
            found.append(f"({_NOT_OURS.format(namespace)})")
        if not found:
            return "false"
        joined = " OR ".join(found)
        return f"(({joined}) AND {_NOT_EXTENSION.format(relation)})"


async def inspect(query: Query, scope: SchemaScope) -> DatabaseSchema:
    """Read the schema.

    Args:
        query: runs SQL with an empty search_path.
        scope: what is read.

    Raises:
        PublisherError, TargetError: a query failed.
    """
    within = scope.condition("n", "c")
    conkey, confkey, keys = (
        _NAMES.format(*of) for of in (("o.conkey", "o.conrelid"), ("o.confkey", "o.confrelid"), ("i.indkey::int2[]", "i.indrelid"))
    )
    tables, columns = await _columns(query, within)
    constraints = defaultdict[TableName, list[ConstraintSchema]](list)
    for namespace, table, name, kind, definition, names, other, referenced, others, on_delete, on_update in await query(
        _CONSTRAINTS.format(within, conkey=conkey, confkey=confkey)
    ):
        constraints[_name(namespace, table)].append(
            ConstraintSchema(
                name=name or "",
                kind=kind or "",
                definition=definition or "",
                columns=_texts(names),
                references=None if referenced is None else _name(other, referenced),
                referenced_columns=_texts(others),
                on_delete=(on_delete or "").strip(),
                on_update=(on_update or "").strip(),
            )
        )
    indexes = defaultdict[TableName, list[IndexSchema]](list)
    for namespace, table, name, quoted, definition, unique, valid, names in await query(_INDEXES.format(within, keys=keys)):
        indexes[_name(namespace, table)].append(
            IndexSchema(
                name=name or "",
                definition=(definition or "").replace(f"INDEX {quoted} ON ", "INDEX ON ", 1),
                unique=unique == "true",
                columns=_texts(names),
                valid=valid == "true",
            )
        )
    sequences = scope.condition("sn", "s")
    return DatabaseSchema(
        tables={
            name: TableSchema(
                name=name,
                columns=tuple(columns[name]),
                constraints=tuple(constraints[name]),
                indexes=tuple(indexes[name]),
                replica_identity=replica_identity,
                comment=comment,
            )
            for name, (replica_identity, comment) in tables.items()
        },
        sequences=tuple(
            SequenceSchema(
                name=_name(namespace, name), options=options or "", owner=(_name(of, table), column) if table and column else None
            )
            for namespace, name, options, of, table, column in await query(_SEQUENCES.format(within, sequences))
        ),
    )


async def _columns(query: Query, within: str) -> tuple[dict[TableName, tuple[str, str | None]], defaultdict[TableName, list[ColumnSchema]]]:
    tables: dict[TableName, tuple[str, str | None]] = {}
    columns = defaultdict[TableName, list[ColumnSchema]](list)
    for row in await query(_COLUMNS.format(within)):
        namespace, table, replica_identity, comment, column, *facts = row
        name = _name(namespace, table)
        tables[name] = (replica_identity or "", comment)
        if column is not None:
            columns[name].append(_column(column, facts))
    return tables, columns


def _column(name: str, facts: Sequence[str | None]) -> ColumnSchema:
    kind, not_null, default, identity, generated, collation, labels, comment = facts
    return ColumnSchema(
        name=name,
        type=kind or "",
        not_null=not_null == "true",
        default=default,
        identity=(identity or "").strip(),
        generated=(generated or "").strip(),
        collation=collation,
        labels=_texts(labels),
        comment=comment,
    )


def _name(namespace: str | None, name: str | None) -> TableName:
    return TableName(namespace or "", name or "")


def _texts(text: str | None) -> tuple[str, ...]:
    return tuple(json.loads(text)) if text else ()
