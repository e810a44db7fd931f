"""The SQL of changes whose conflicts are resolved by rules: each statement finds the conflict and does what the rule says.

A change is one statement, also if it finds a conflict, so the pipeline never waits for an answer. Its parts are CTEs with these names:

``own``
    The row that an UPDATE or DELETE is about, found and locked, with its last change.
``r``, ``n1`` …, ``l``
    The new row, its keys in each unique index, and the other rows that have these keys, locked. ``i`` is the number of the index.
``j``
    What the rule says about ``l``: ``a`` apply the change, ``k`` keep the target's rows, ``e`` error.
``removed``, ``changed``, ``added``
    What is written. ``changed`` and ``added`` read the count of ``removed``, so the rows that are in their way are gone by then: a unique
    index does not see a row that this transaction has deleted.

Rule ``error`` of a unique index needs no SQL: the change is made, and the server rejects it. For a missing row, a cast fails, with a word
that tells the reason (:data:`REASONS`).

``last_update_wins`` compares the commit time on the publisher, which is the last parameter. It is NULL in a streamed transaction before its
end: then the statement fails at a conflict, and the transaction is applied at its end. A row without a commit time is older. If both times
are equal, the change is applied.

The result has a row for each conflict, after a first row with the number of changes that were made:
:meth:`subscriber.sinks.postgres.apply.error_reports.Counted.resolve` reads it.

Rows that the table had when its synchronization ended count as the subscription's own: their origins were those of the copy, and are
dropped since. ``horizon`` is the transaction that ended it.
"""

# names are quoted, values are parameters
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from subscriber.config import RULES
from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.apply.change_sql import Search, idle_assignment, other_origin, values_of, written_row
from subscriber.sinks.postgres.apply.set_sql import elements
from subscriber.sinks.postgres.session.statement import Resolution, Statement
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping, Resolving, UniqueIndex, qualified_name

__all__ = ["REASONS", "delete_resolving", "insert_resolving", "insert_set_resolving", "update_resolving"]

REASONS: Final = {
    "missing": "subscriber:missing",
    "unsent": "subscriber:unsent",
    "unknown": "subscriber:unknown",
}
"""What is in the message of a cast that fails: the row is missing; a value was not sent; the commit time is not known yet."""

_INT8: Final = 20
_TIME: Final = "('2000-01-01 00:00:00+00'::pg_catalog.timestamptz + {} * '1 microsecond'::pg_catalog.interval)"
_UNTRACKED: Final = "NULL::pg_catalog.text AS at, NULL::pg_catalog.text AS origin, NULL::pg_catalog.timestamptz AS time"
_TRACKED: Final = (
    "o.timestamp::pg_catalog.text AS at, o.timestamp AS time, CASE WHEN o.roident <> 0 THEN coalesce((SELECT g.roname"
    " FROM pg_catalog.pg_replication_origin AS g WHERE g.roident = o.roident), '') END AS origin"
)
_GONE: Final = "(SELECT pg_catalog.count(*) AS z FROM removed) AS gone"
_NO_ROWS: Final = "SELECT 1 AS n, 0 AS i, NULL::oid AS t, NULL::tid AS c, NULL::xid AS m WHERE false"


def _fails(reason: str, condition: str, otherwise: str) -> str:
    """An expression that fails if the condition is true."""
    return f"CASE WHEN {condition} THEN (CASE WHEN {condition} THEN '{REASONS[reason]}' ELSE '0' END)::int4::text ELSE {otherwise} END"


class _Parts:
    """The CTEs of one statement.

    Args:
        mapping: the relation and its target.
        timed: the number of the parameter that is the publisher's commit time.
        tracked: whether the target keeps commit timestamps.
    """

    def __init__(self, mapping: RelationMapping, timed: int, *, tracked: bool) -> None:
        assert mapping.resolving is not None
        self.mapping = mapping
        self.resolving: Resolving = mapping.resolving
        self.rules = mapping.resolving.rules
        self.scanned = mapping.table.scanned
        self.ctes: list[str] = []
        self.conflicts: list[str] = []
        self.time = f"${timed}"
        self.timed = False
        self.unsent: tuple[int, ...] = ()
        self._tracked = tracked

    def add(self, name: str, query: str) -> None:
        self.ctes.append(f"{name} AS ({query})")

    def wins(self, rule: str, newest: str, there: str) -> str:
        """What a rule says: ``a``, ``k`` or ``e``.

        Args:
            rule: the rule.
            newest: commit time of the newest existing row.
            there: whether there is such a row. It is not known before the statement runs, so that the planner does not fail.
        """
        if rule != "last_update_wins":
            return {"apply_remote": "'a'", "keep_local": "'k'", "error": "'e'"}[rule]
        self.timed = True
        decided = f"CASE WHEN coalesce({_TIME.format(self.time)} >= {newest}, true) THEN 'a' ELSE 'k' END"
        return _fails("unknown", f"{self.time}::int8 IS NULL AND {there}", decided)

    def add_update(self, values: Mapping[str, str], source: str, where: str) -> None:
        """``changed``: set columns of the target's rows. If there is none to set, the target's triggers still see the UPDATE."""
        sets = ", ".join(f"{quote_identifier(name)} = {value}" for name, value in values.items()) or idle_assignment(self.mapping)
        if sets is not None:
            self.add("changed", f"UPDATE {self.scanned} AS x SET {sets} FROM {source} WHERE {where} RETURNING 1")

    def tracked(self, source: str) -> str:
        """Rows with a transaction ``m``, and its time and origin."""
        if not self._tracked:
            return f"SELECT {source}.*, {_UNTRACKED} FROM {source}"
        last = f"LATERAL pg_catalog.pg_xact_commit_timestamp_origin({source}.m)"
        return f"SELECT {source}.*, {_TRACKED} FROM {source} LEFT JOIN {last} AS o ON true"

    def add_own(self, search: Search, kind: str, origin: int | None, new: str = "NULL") -> None:
        """``own``: with the column ``o``: what the rule about its origin says. ``new``: the new row, for the log."""
        columns = "x.tableoid AS t, x.ctid AS c, x.xmin AS m"
        self.add("found", f"SELECT {columns} FROM {self.scanned} AS x WHERE {search.predicate} LIMIT 1 FOR UPDATE")
        self.add("tracked", self.tracked("found"))
        if origin is None:
            self.add("own", "SELECT tracked.*, false AS other, 'a'::text AS o FROM tracked")
            return
        other = other_origin("tracked.m", origin)
        if self.resolving.horizon is not None:
            # age() of what is older is larger; it is a number of 32 bits
            now = "pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::int8"
            horizon = self.resolving.horizon
            other += (
                f" AND (pg_catalog.age(tracked.m) < pg_catalog.age('{horizon % 2**32}'::pg_catalog.xid)"
                f" OR {now} - {horizon} NOT BETWEEN 0 AND {2**31 - 1_000_000})"
            )
        decided = self.wins(getattr(self.rules, f"{kind}_origin_differs"), "w.time", "w.m IS NOT NULL")
        rows = f"(SELECT tracked.*, {other} AS other FROM tracked) AS w"
        self.add("own", f"SELECT w.*, CASE WHEN w.other THEN {decided} ELSE 'a' END AS o FROM {rows}")
        self.add_conflict((f"'{kind}_origin_differs'", "1", "o", "0"), "own", self.logged(search.values, "own", new), "WHERE other")

    def logged(self, key: Iterable[tuple[str, str]], existing: str = "", new: str = "NULL") -> str:
        """What the log of conflicts has of the rows: the key, the existing row and the new row.

        Args:
            key: the key's columns and values.
            existing: the CTE of the existing row; empty: there is none.
            new: the new row.
        """
        values = ", ".join(f"{value} AS {quote_identifier(name)}" for name, value in key) if self.resolving.logged else ""
        text = f"(SELECT pg_catalog.to_jsonb(s.*)::text FROM (SELECT {values}) AS s)" if values else "NULL"
        if not self.resolving.log_rows:
            return f"{text}, NULL, NULL"
        # read again by its place: a change without a conflict reads nothing more
        place = f"FROM {self.scanned} AS x WHERE x.tableoid = {existing}.t AND x.ctid = {existing}.c"
        return f"{text}, {f'(SELECT pg_catalog.to_jsonb(x.*)::text {place})' if existing else 'NULL'}, {new}"

    def add_conflict(self, known: tuple[str, str, str, str], source: str, logged: str, where: str, rows: str | None = None) -> None:
        """Return the conflicts of one kind.

        Args:
            known: the kind, the number of the new row in a set, what the rule says, and the number of the index.
            source: the rows that exist.
            logged: from :meth:`logged`.
            where: which of the rows conflict.
            rows: the query for them; None: ``source`` is a CTE.
        """
        partition = "NULL, NULL"
        if self.mapping.table.kind == "p":
            namespace = "pg_catalog.pg_class AS p JOIN pg_catalog.pg_namespace AS s ON s.oid = p.relnamespace"
            partition = (
                f"(SELECT s.nspname::text FROM {namespace} WHERE p.oid = {source}.t),"
                f" (SELECT p.relname::text FROM pg_catalog.pg_class AS p WHERE p.oid = {source}.t)"
            )
        existing = f"{source}.m::text, {source}.at, {source}.origin, {partition}"
        self.conflicts.append(f"SELECT {', '.join(known)}, {existing}, {logged} FROM {rows or source} {where}")

    def add_collided(self, kind: str, logged: str, where: str = "") -> None:
        """Return a conflict for a new row that has a rule applied."""
        rows = "(SELECT DISTINCT ON (l.n) l.*, j.k, j.act FROM l JOIN j ON j.n = l.n WHERE j.act <> 'e' ORDER BY l.n, l.i) AS d"
        name = f"CASE d.k WHEN 1 THEN '{kind}_exists' ELSE 'multiple_unique_conflicts' END"
        self.add_conflict((name, "1", "d.act", "d.i"), "d", logged, where, rows)

    def add_collisions(self, indexes: Sequence[UniqueIndex], keys: Sequence[str], *, own: bool) -> None:
        """``l`` and ``j``. ``keys``: a query for the new row's keys in each index."""
        another = " AND NOT EXISTS (SELECT FROM own WHERE own.t = x.tableoid AND own.c = x.ctid)" if own else ""
        for number, (index, key) in enumerate(zip(indexes, keys, strict=True), 1):
            equal = " AND ".join(
                f"({expression}) {operator} subscriber_k.subscriber_k{place}"
                for place, (expression, operator) in enumerate(zip(index.keys, index.operators, strict=True))
            )
            predicate = f" AND ({index.predicate})" if index.predicate else ""
            self.add(f"n{number}", key)
            self.add(
                f"f{number}",
                f"SELECT subscriber_k.subscriber_n AS n, x.tableoid AS t, x.ctid AS c, x.xmin AS m FROM {self.scanned} AS x,"
                f" n{number} AS subscriber_k WHERE {equal}{predicate}{another} FOR UPDATE OF x",
            )
        rows = " UNION ALL ".join(f"SELECT n, {number} AS i, t, c, m FROM f{number}" for number in range(1, len(indexes) + 1))
        self.add("f", rows or _NO_ROWS)
        self.add("l", self.tracked("f"))

    def add_decision(self, one: str) -> None:
        """``j``: ``one`` is the rule for a row that is in the way in one index."""
        several = self.rules.multiple_unique_conflicts
        newest = "max(time)", "count(*) > 0"
        act = f"CASE WHEN count(*) = 1 THEN {self.wins(one, *newest)} ELSE {self.wins(several, *newest)} END"
        self.add("j", f"SELECT n, count(*) AS k, min(i) AS i, {act} AS act FROM l GROUP BY n")

    def statement(self, base: Statement, made: str, locked: Sequence[str]) -> Statement:
        """The whole statement.

        Args:
            base: the statement for the same change without rules.
            made: the number of changes that were made.
            locked: the CTEs of locked rows. One that this statement's snapshot does not see is an error, as in
                :func:`~subscriber.sinks.postgres.apply.change_sql.delete`. So is one that a set has twice.
        """
        found = " + ".join(f"(SELECT pg_catalog.count(*) FROM {name} WHERE t IS NOT NULL)" for name in locked) or "0"
        # two rows of a set that have one key are applied one by one: the last one wins
        counted = "DISTINCT (s.t, s.c)" if base.together else "*"
        seen = " + ".join(
            f"(SELECT pg_catalog.count({counted}) FROM {self.scanned} AS x, {name} AS s WHERE s.t = x.tableoid AND s.c = x.ctid)"
            for name in locked
        )
        result = f"SELECT '' AS kind, CASE WHEN {found} = {seen or '0'} THEN {made} ELSE 1 / (({found}) - ({found})) END AS made"
        result += ", '', 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL"
        sql = f"WITH {', '.join(self.ctes)} {' UNION ALL '.join([result, *self.conflicts])}"
        rules = {kind: getattr(self.rules, kind) for kind in RULES}
        names = tuple((index.name, index.keys) for index in self.resolving.indexes)
        return replace(
            base,
            sql=sql.encode("utf-8", "surrogateescape"),
            parameter_types=(*base.parameter_types, _INT8) if self.timed else base.parameter_types,
            finds=True,
            resolves=Resolution(rules, names, self.timed, tuple(self.mapping.columns[n].name for n in self.unsent), self.resolving.logged),
        )


def _new(mapping: RelationMapping) -> str:
    """The new row for the log, without the columns that only the target has."""
    columns = ", ".join(f"r.{quote_identifier(column.name)}" for column in mapping.columns)
    return f"(SELECT pg_catalog.to_jsonb(s.*)::text FROM (SELECT {columns} FROM r) AS s)"


def _missing(kind: str, act: str, logged: str) -> str:
    return f"SELECT '{kind}_missing', 1, '{act}', 0, NULL, NULL, NULL, NULL, NULL, {logged} WHERE NOT EXISTS (SELECT FROM own)"


def _into(mapping: RelationMapping, names: Iterable[str]) -> str:
    columns = ", ".join(map(quote_identifier, names))
    return f"INSERT INTO {qualified_name(mapping.table.name)} ({columns}) OVERRIDING SYSTEM VALUE"


def _keys_of(row: str, indexes: Sequence[UniqueIndex]) -> list[str]:
    """The keys of one new row. ``row``: the CTE that has it, with all columns of the table."""
    found = []
    for index in indexes:
        keys = ", ".join(f"({expression}) AS subscriber_k{place}" for place, expression in enumerate(index.keys))
        found.append(f"SELECT 1 AS subscriber_n, {keys} FROM {row} AS x" + (f" WHERE {index.predicate}" if index.predicate else ""))
    return found


def insert_resolving(mapping: RelationMapping, base: Statement, *, tracked: bool) -> Statement:
    """Insert one row. ``base``: the INSERT without rules. ``tracked``: whether the target keeps commit timestamps."""
    parts = _Parts(mapping, len(mapping.columns) + 1, tracked=tracked)
    indexes, scanned, values = parts.resolving.indexes, parts.scanned, values_of(mapping)
    parts.add("r", written_row(mapping, values))
    parts.add_collisions(indexes, _keys_of("r", indexes), own=False)
    parts.add_decision(parts.rules.insert_exists)
    parts.add("first", "SELECT t, c FROM l ORDER BY i LIMIT 1")
    always = {column.name for column in mapping.columns if column.identity_always}
    # UPDATE cannot set such a column: if another index than its own may find the row, that row is deleted
    whole = bool(always) and len(indexes) > 1
    other = "" if whole else " AND NOT (l.t = first.t AND l.c = first.c)"
    parts.add(
        "removed",
        f"DELETE FROM {scanned} AS x USING l, j, first WHERE x.tableoid = l.t AND x.ctid = l.c AND j.act = 'a'{other} RETURNING 1",
    )
    if not whole:
        where = "x.tableoid = first.t AND x.ctid = first.c AND j.act = 'a' AND gone.z >= 0"
        parts.add_update({name: value for name, value in values.items() if name not in always}, f"j, first, {_GONE}", where)
    kept = "SELECT FROM j WHERE j.act = 'k'" if whole else "SELECT FROM j WHERE j.act <> 'e'"
    parts.add(
        "added", f"{_into(mapping, values)} SELECT {', '.join(values.values())} FROM {_GONE} WHERE NOT EXISTS ({kept}) AND gone.z >= 0"
    )
    key = [(mapping.columns[index].name, f"${index + 1}") for index, _ in mapping.key or ()]
    parts.add_collided("insert", parts.logged(key, "d", _new(mapping)))
    return parts.statement(base, "(SELECT 1 - pg_catalog.count(*) FROM j WHERE act = 'k')", ["l"])


def insert_set_resolving(mapping: RelationMapping, arrays: Sequence[int], base: Statement, *, tracked: bool) -> Statement:
    """Insert the rows of a set, into a table that has no unique index but its key. ``base``: the INSERT of a set without rules."""
    parts = _Parts(mapping, len(arrays) + 1, tracked=tracked)
    scanned = parts.scanned
    found = " AND ".join(f"x.{quote_identifier(mapping.columns[index].name)} {equals} u.c{index}" for index, equals in mapping.key or ())
    parts.add("u", f"SELECT pg_catalog.row_number() OVER () AS n, s.* FROM (SELECT {elements(mapping, arrays)}) AS s")
    parts.add("f", f"SELECT u.*, x.tableoid AS t, x.ctid AS c, x.xmin AS m FROM {scanned} AS x, u WHERE {found} FOR UPDATE OF x")
    act = parts.wins(parts.rules.insert_exists, "w.time", "w.m IS NOT NULL")
    parts.add("l", f"SELECT w.*, {act} AS act FROM ({parts.tracked('f')}) AS w")
    always = {column.name for column in mapping.columns if column.identity_always}
    values = {mapping.columns[number].name: f"c{number}" for number in arrays}
    where = "x.tableoid = l.t AND x.ctid = l.c AND l.act = 'a'"
    parts.add_update({name: f"l.{value}" for name, value in values.items() if name not in always}, "l", where)
    given = ", ".join(f"u.{value}" for value in values.values())
    # NOT IN: the joins of a set are nested loops, but this is hashed
    parts.add("added", f"{_into(mapping, values)} SELECT {given} FROM u WHERE u.n NOT IN (SELECT l.n FROM l WHERE l.act <> 'e')")
    key = [(mapping.columns[index].name, f"l.c{index}") for index, _ in mapping.key or ()]
    new = ", ".join(f"l.{value} AS {quote_identifier(name)}" for name, value in values.items())
    logged = parts.logged(key, "l", f"(SELECT pg_catalog.to_jsonb(s.*)::text FROM (SELECT {new}) AS s)")
    parts.add_conflict(("'insert_exists'", "n", "act", "1"), "l", logged, "WHERE act <> 'e'")
    return parts.statement(base, "(SELECT pg_catalog.count(*) FROM u) - (SELECT pg_catalog.count(*) FROM l WHERE act = 'k')", ["l"])


def update_resolving(
    mapping: RelationMapping, unchanged: bytes, nulls: bytes, *, old: bool, replace: bool, origin: int | None, base: Statement
) -> Statement:
    """Update one row. The arguments are those of :func:`~subscriber.sinks.postgres.apply.change_sql.update`.

    ``base``: that statement.
    """
    search = Search(mapping, nulls, own=old, first=len(mapping.columns), origin=None)
    parts = _Parts(mapping, len(mapping.columns) + len(search.parameters) + 1, tracked=origin is not None)
    rules, scanned = parts.rules, parts.scanned
    values = values_of(mapping, unchanged, replace=True)
    parts.unsent = tuple(index for index in range(len(mapping.columns)) if unchanged[index : index + 1] == b"u")
    parts.add_own(search, "update", origin, _new(mapping))
    by_rule = {rules.update_exists, rules.multiple_unique_conflicts} != {"error"}
    indexes = parts.resolving.indexes if by_rule else ()
    parts.add("r", written_row(mapping, values, search.predicate, missing=True))
    if indexes:
        parts.add_collisions(indexes, _keys_of("r", indexes), own=True)
        parts.add_decision(rules.update_exists)
    missing = "'m'"
    if rules.update_missing == "error":
        missing = _fails("missing", "NOT EXISTS (SELECT FROM own)", "'m'")
    elif rules.update_missing == "insert" and parts.unsent:
        missing = _fails("unsent", "NOT EXISTS (SELECT FROM own)", "'m'")
    act = "coalesce((SELECT act FROM j), 'a')" if indexes else "'a'::text"
    parts.add("go", f"SELECT coalesce((SELECT o FROM own), {missing}) AS o, {act} AS act")
    inserts = rules.update_missing == "insert" and not parts.unsent
    makes = "('a', 'm')" if inserts else "('a')"
    if indexes:
        parts.add(
            "removed",
            f"DELETE FROM {scanned} AS x USING l, go WHERE x.tableoid = l.t AND x.ctid = l.c AND go.o IN {makes} AND go.act = 'a'"
            " RETURNING 1",
        )
    else:
        parts.add("removed", "SELECT 1 WHERE false")
    wanted = "x.tableoid = own.t AND x.ctid = own.c AND go.o = 'a' AND go.act <> 'k' AND gone.z >= 0"
    if replace:
        kept = [column.name for column in mapping.table.columns if not column.generated]
        row = ", ".join(values.get(name, f"replaced.{quote_identifier(name)}") for name in kept)
        parts.add("replaced", f"DELETE FROM {scanned} AS x USING own, go, {_GONE} WHERE {wanted} RETURNING x.*")
        parts.add("changed", f"{_into(mapping, kept)} SELECT {row} FROM replaced RETURNING 1")
    else:
        always = {column.name for column in mapping.columns if column.identity_always}
        parts.add_update({name: value for name, value in values.items() if name not in always}, f"own, go, {_GONE}", wanted)
    if inserts:
        where = "go.o = 'm' AND go.act <> 'k' AND gone.z >= 0"
        parts.add("added", f"{_into(mapping, values)} SELECT {', '.join(values.values())} FROM go, {_GONE} WHERE {where}")
    parts.conflicts.append(_missing("update", "i" if inserts else "s", parts.logged(search.values, new=_new(mapping))))
    if indexes:
        parts.add_collided("update", parts.logged(search.values, "d", _new(mapping)), f"WHERE (SELECT o FROM go) IN {makes}")
    made = f"(SELECT pg_catalog.count(*) FROM go WHERE o IN {makes} AND act <> 'k')"
    return parts.statement(base, made, ["found", "l"] if indexes else ["found"])


def delete_resolving(mapping: RelationMapping, nulls: bytes, *, origin: int | None, base: Statement) -> Statement:
    """Delete one row. The arguments are those of :func:`~subscriber.sinks.postgres.apply.change_sql.delete`; ``base``: that statement."""
    search = Search(mapping, nulls, own=True, first=0, origin=None)
    parts = _Parts(mapping, len(search.parameters) + 1, tracked=origin is not None)
    parts.add_own(search, "delete", origin)
    missing = _fails("missing", "NOT EXISTS (SELECT FROM own)", "'m'") if parts.rules.delete_missing == "error" else "'m'"
    parts.add("go", f"SELECT coalesce((SELECT o FROM own), {missing}) AS o")
    parts.add(
        "removed", f"DELETE FROM {parts.scanned} AS x USING own, go WHERE x.tableoid = own.t AND x.ctid = own.c AND go.o = 'a' RETURNING 1"
    )
    parts.conflicts.append(_missing("delete", "s", parts.logged(search.values)))
    return parts.statement(base, "(SELECT pg_catalog.count(*) FROM go WHERE o = 'a')", ["found"])
