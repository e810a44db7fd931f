"""Operators, functions and casts with operands of each combination of types: what we accept has the server's type and its values.

A publication is given ``t WHERE ((expression) IS NULL), u WHERE (expression), v WHERE (wrong)``. The error of the second table names the
type of the expression. The error of the third one is there so that no publication is ever changed, which makes the test fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, Final

import psycopg
import pytest

from subscriber.rowfilter import RowFilterError
from subscriber.rowfilter.binding import bind_expression
from subscriber.rowfilter.sql_types import read_literal
from subscriber.rowfilter.syntax import Node, parse_expression
from subscriber.types import PgType, TypeRegistry
from subscriber.types.builtin import SQL_NAMES
from tests.support.database import Database

pytestmark = pytest.mark.publisher(min=15, lacks="row filters")

TYPES: Final[dict[str, tuple[int, str, str, str]]] = {
    # the oid, the declaration, and the values of two rows; a third row has NULL
    "bool": (16, "boolean", "true", "false"),
    "int2": (21, "smallint", "1", "-2"),
    "int4": (23, "integer", "1", "-2"),
    "int8": (20, "bigint", "1", "-2"),
    "numeric": (1700, "numeric", "1.0", "-2.5"),
    "float4": (700, "real", "1", "-2.5"),
    "float8": (701, "double precision", "1", "-2.5"),
    "text": (25, "text", "a ", "1"),
    "varchar": (1043, "character varying(4)", "a ", "1"),
    "bpchar": (1042, "character(4)", "a", "1"),
    "date": (1082, "date", "2020-01-01", "infinity"),
    "timestamp": (1114, "timestamp", "2020-01-01 00:00:00", "2020-01-01 12:00:00"),
    "timestamptz": (1184, "timestamptz", "2020-01-01 00:00:00+00", "2020-01-01 12:00:00+00"),
    "time": (1083, "time", "12:00:00", "24:00:00"),
    "uuid": (2950, "uuid", "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"),
    "bytea": (17, "bytea", "\\x61", "\\x"),
}
ROWS: Final = ({name: one for name, (_, _, one, _) in TYPES.items()}, {name: two for name, (_, _, _, two) in TYPES.items()})
CONSTANTS: Final = [f"{name} '{value}'" for name, value in ROWS[0].items()]
QUOTED: Final = ["NULL", "'1'", "'a '"]
ONE = ["-({})", "NOT {}", "{} IS NULL", "{} IS TRUE", "{} IS NOT FALSE", '({} COLLATE "C") IS NULL']
ONE += [f"{name}({{}})" for name in ("abs", "length", "octet_length", "lower", "upper", "coalesce", "greatest")]
ONE += ['lower({} COLLATE "C")', 'upper({} COLLATE "C")', "CASE WHEN {} THEN 1 END", "CASE WHEN true THEN {} END"]
ONE += [form.format("{}", name) for name in TYPES for form in ("{}::{}", "CAST({} AS {}) IS NOT NULL")]
TWO = [f"{{}} {sign} {{}}" for sign in ("=", "<", "||", "+", "-", "*", "/", "%", "LIKE", "AND", "IS DISTINCT FROM")]
TWO += [f'({{}} COLLATE "C") {sign} ({{}} COLLATE "C")' for sign in ("<", "LIKE")]
TWO += [f"{name}({{}}, {{}})" for name in ("mod", "left", "right", "substr", "starts_with", "nullif", "coalesce", "least")]
TWO += ['greatest({} COLLATE "C", {})', "CASE {} WHEN {} THEN 1 END", "CASE WHEN true THEN {} ELSE {} END", "{} IN ({})"]
LISTS = ["{} = ANY (ARRAY[{}])", "{} <> ALL (ARRAY[{}, NULL])", "{} IN ({}, 1, 'x')", '{} < ALL (ARRAY[{} COLLATE "C"])']
THREE = ["coalesce({}, {}, {})", "CASE WHEN true THEN {} WHEN false THEN {} ELSE {} END", "{} IN ({}, {})"]
THREE += ["{} = ANY (ARRAY[{}, {}])", "{} BETWEEN {} AND {}", "substr({}, {}, {})"]
FAMILIES: Final = (("int2", "int4", "int8", "numeric", "float4", "float8"), ("text", "varchar", "bpchar", "int4"))
TIMES: Final = ("date", "timestamp", "timestamptz", "time")
ARRAYS: Final = [
    form.format("{}", value, name)
    for name in TYPES
    for value in ("{{1,2}}", "{{2020-01-01}}", "{{NULL}}")
    for form in ("{} = ANY ('{}'::{}[])", "{} <> ALL ('{}')")
]

JUDGE: Final = """
CREATE FUNCTION judge(expressions text[]) RETURNS SETOF text[] LANGUAGE plpgsql AS $$
DECLARE
    expression text;
    said text;
    found text[];
BEGIN
    FOREACH expression IN ARRAY expressions LOOP
        BEGIN
            EXECUTE format('ALTER PUBLICATION pub SET TABLE t WHERE ((%1$s) IS NULL), u WHERE (%1$s), v WHERE (''1''::xid)', expression);
        EXCEPTION WHEN OTHERS THEN
            said := SQLERRM;
        END;
        found := NULL;
        IF said ~ '^argument of PUBLICATION WHERE must be type boolean' THEN
            BEGIN
                EXECUTE format('SELECT array_agg((%s)::text ORDER BY id) FROM t', expression) INTO found;
            EXCEPTION WHEN OTHERS THEN
            END;
        END IF;
        RETURN NEXT said || found;
    END LOOP;
END $$
"""
CATALOG: Final = """
WITH operands AS (SELECT typname::text AS name, oid FROM pg_type WHERE typname = ANY (%s) AND typnamespace = 'pg_catalog'::regnamespace)
SELECT DISTINCT concat('{} ', o.oprname, ' {}'), ARRAY[a.name, b.name]
  FROM pg_operator AS o JOIN operands AS a ON a.oid = o.oprleft JOIN operands AS b ON b.oid = o.oprright
UNION ALL SELECT concat(o.oprname, ' {}'), ARRAY[b.name] FROM pg_operator AS o JOIN operands AS b ON b.oid = o.oprright WHERE o.oprleft = 0
UNION ALL SELECT concat(quote_ident(p.proname), '(', array_to_string(array_fill('{}'::text, ARRAY[p.pronargs]), ', '), ')'), given.names
  FROM pg_proc AS p, LATERAL (SELECT array_agg(t.name ORDER BY n) AS names FROM unnest(p.proargtypes) WITH ORDINALITY AS u (oid, n)
                              JOIN operands AS t ON t.oid = u.oid) AS given
 WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND p.provolatile = 'i' AND NOT p.proretset
   AND p.pronargs BETWEEN 1 AND 3 AND cardinality(given.names) = p.pronargs
"""
"""All operators of the server for these types, and all immutable functions."""
OF_TYPE: Final = "argument of PUBLICATION WHERE must be type boolean, not type "
OURS: Final = "row filter cannot be evaluated by the subscriber"


def expressions() -> Iterator[tuple[str, tuple[str, ...]]]:
    """A form with an operand for each hole. An operand is the name of a type, for a column of it, or a constant."""
    yield from product(ONE, product([*TYPES, *QUOTED, *CONSTANTS]))
    yield from product([*TWO, *LISTS], product([*TYPES, *QUOTED], repeat=2))
    yield from product(LISTS, product(TYPES, CONSTANTS))
    yield from ((f"{{}} = ANY (ARRAY[{{}}]::{name}[])", (name, each)) for name in TYPES for each in (*TYPES, *QUOTED, *CONSTANTS))
    yield from ((f"{{}} {sign} {{}}", (name, name)) for sign in ("<>", "<=", ">", ">=") for name in TYPES)
    for family in (*FAMILIES, TIMES):
        yield from product(THREE, product([*family, "NULL", "'1'"], repeat=3))
    yield from product(ARRAYS, product(TYPES))


@cache
def parsed(text: str) -> Node:
    return parse_expression(text)


class Ours:
    """What we say about an expression: an error, or its type and its value in each of the rows (None if it cannot be evaluated)."""

    def __init__(self, form: str, operands: Sequence[str], types: dict[str, PgType]) -> None:
        self.error: str | None = None
        self.type = ""
        columns = {name: operand for name, operand in zip("abc", operands, strict=False) if operand in TYPES}
        text = form.format(*(name if name in columns else operand for name, operand in zip("abc", operands, strict=False)))
        try:
            used, found = bind_expression(parsed(text), {name: types[operand] for name, operand in columns.items()})
        except RowFilterError as error:
            self.error = str(error)
            return
        self.type = found.type
        rows = [[read_literal(values[columns[name]], type_) for name, type_ in used.items()] for values in ROWS]
        rows.append([None] * len(used))
        try:
            self.values: list[Any] | None = [found.evaluate(row) for row in rows]
        except RowFilterError:
            self.values = None


def difference(ours: Ours, said: str, values: list[str | None]) -> str | None:
    """What the server says otherwise. It need not accept what we accept not, but then we must not quote its errors."""
    accepts = said.startswith(OF_TYPE)
    if ours.error is not None:
        return f"we quote the server's error, but it accepts: {ours.error}" if accepts and not ours.error.startswith(OURS) else None
    if not accepts:
        return f"we accept, the server says: {said}"
    type_ = said.removeprefix(OF_TYPE).replace("xid", "boolean")
    if ours.type == "unknown" or type_ != SQL_NAMES.get(ours.type, ours.type):
        return f"our type is {ours.type}, the server's {type_}"
    found = [None if value is None else read_literal(value, ours.type) for value in values] or None
    return f"our values are {ours.values}, the server's {found}" if ours.values != found else None


@pytest.mark.timeout(180)
@pytest.mark.matrix
async def test_types_and_values_are_the_servers(publisher_db: Database, record_property: Callable[[str, object], None]) -> None:
    listed = ", ".join(f"c_{name} {declared}" for name, (_, declared, *_) in TYPES.items())
    publisher_db.execute("; ".join(f"CREATE TABLE {table} (id int, {listed})" for table in "tuv"))
    publisher_db.execute(f"CREATE PUBLICATION pub FOR TABLE t; {JUDGE}")
    for number, row in enumerate(ROWS):
        values = ", ".join(f"'{value}'" for value in row.values())
        publisher_db.execute(f"INSERT INTO t VALUES ({number}, {values})")
    publisher_db.execute("INSERT INTO t VALUES (2)")
    with psycopg.connect(publisher_db.conninfo()) as session:
        catalog = [(form, tuple(operands)) for form, operands in session.execute(CATALOG, [list(TYPES)])]
    asked = list(dict.fromkeys([*expressions(), *catalog]))
    texts = [form.format(*(f"c_{each}" if each in TYPES else each for each in operands)) for form, operands in asked]
    with psycopg.connect(publisher_db.conninfo(options="-c timezone=UTC -c client_min_messages=error")) as session:
        answers = session.execute("SELECT judge(%s)", [texts]).fetchall()
    types = {name: TypeRegistry().resolve(oid, -1) for name, (oid, *_) in TYPES.items()}
    counts, wrong = Counter[str](), list[str]()
    for (form, operands), text, (answer,) in zip(asked, texts, answers, strict=True):
        ours = Ours(form, operands, types)
        counts["refused" if ours.error else "accepted"] += 1
        if found := difference(ours, answer[0], answer[1:]):
            wrong.append(f"{text}: {found}")
    record_property("compared", str(dict(counts)))
    assert counts["accepted"] > 3000
    assert not wrong, "\n".join([f"{len(wrong)} of {len(texts)} differ", *wrong[:40]])
