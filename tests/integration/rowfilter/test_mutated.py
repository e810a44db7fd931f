"""Filters that are nearly SQL: what this package accepts, the server accepts, too, and evaluates alike for every row.

The parser accepts more than PostgreSQL and groups some operators differently. So random filters are damaged: tokens are dropped, repeated,
exchanged and replaced. Each result that this package accepts is given to the server, as a publication's row filter and in a query of a
table with values of all types.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import psycopg
import pytest

from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Insert, Relation
from subscriber.rowfilter import RowFilter, RowFilterError, parse_filter
from subscriber.types import TypeRegistry
from tests.support.database import Database
from tests.support.row_filters import EVALUATED, REFUSED, TYPES, VALUES, Generator

pytestmark = pytest.mark.publisher(min=15, lacks="row filters")

COLUMNS = {"id": "int4", **{f"c{number}": type_ for number, type_ in enumerate(TYPES)}}
TOKEN = re.compile(r"""\s+|"[^"]*"|'(?:[^']|'')*'|[A-Za-z_]\w*|\d+(?:\.\d+)?|::|[<>!]=|<>|\|\||!~~|~~|.""", re.DOTALL)
POOL = [
    "(",
    ")",
    "(",
    ")",
    "AND",
    "OR",
    "NOT",
    "=",
    "<>",
    "<",
    ">",
    "<=",
    "IS",
    "NULL",
    "TRUE",
    "FALSE",
    "UNKNOWN",
    "IN",
    "BETWEEN",
    "SYMMETRIC",
    "SOME",
    "LIKE",
    "ILIKE",
    "-",
    "+",
    "*",
    "/",
    "%",
    "||",
    "^",
    "~",
    ",",
    "1",
    "0",
    "2.5",
    "'1'",
    "'a'",
    "CASE",
    "WHEN",
    "THEN",
    "ELSE",
    "END",
    "ANY",
    "ALL",
    "ARRAY",
    "[",
    "]",
    "ISNULL",
    "NOTNULL",
    "DISTINCT",
    "FROM",
    "::",
    "int4",
    "text",
    "numeric",
    "COLLATE",
    '"C"',
    'COLLATE "C"',
    'COLLATE "C"',
    "id",
    "c0",
    "c1",
    "c3",
    "c6",
    "c9",
    "c2 / c1",
    "c2 / c1",
    "==",
    ".",
    ";",
    "$1",
    "E",
    "--",
    "user",
    "date",
    "length",
]
ROWS = 24


async def test_damaged_filters(publisher_db: Database, record_property: Callable[[str, object], None]) -> None:
    counts = compare(publisher_db, seed=7, filters=2000)
    assert counts["evaluated alike"] > 200
    record_property("compared", _summary(counts))


@pytest.mark.slow
@pytest.mark.endurance
@pytest.mark.timeout(1200)
async def test_many_damaged_filters(publisher_db: Database, record_property: Callable[[str, object], None]) -> None:
    counts = compare(publisher_db, seed=8, filters=200_000)
    record_property("compared", _summary(counts))


async def test_server_evaluates_these_parts(publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (a int, b int); INSERT INTO t VALUES (6, 0)")
    for text, fails in EVALUATED:
        with pytest.raises(psycopg.errors.DivisionByZero) if fails else nullcontext():
            publisher_db.fetch(f"SELECT ({text}) FROM t")
    for text in REFUSED:
        with pytest.raises(psycopg.errors.DivisionByZero):
            publisher_db.fetch(f"SELECT ({text}) FROM t LIMIT 0")


def _summary(counts: Counter[str]) -> str:
    return f"{counts['evaluated alike']} damaged filters for {ROWS} rows each; {counts['refused']} refused"


def compare(database: Database, *, seed: int, filters: int) -> Counter[str]:
    """Damage this many filters, and compare those that are accepted."""
    generator = Generator(seed)
    relation, rows = _table(database, generator)
    counts: Counter[str] = Counter()
    registry = TypeRegistry()
    for _ in range(filters):
        text = _damaged(generator, generator.filter(COLUMNS, depth=1))
        try:
            filter_ = parse_filter(text).bind(relation, registry)
        except RowFilterError:
            counts["refused"] += 1
            continue
        _compare(database, text, filter_, rows, counts)
    return counts


def _compare(database: Database, text: str, filter_: RowFilter, rows: list[Insert], counts: Counter[str]) -> None:
    try:
        database.execute(f"CREATE PUBLICATION damaged FOR TABLE t WHERE ({text}) WITH (publish = 'insert'); DROP PUBLICATION damaged")
    except psycopg.Error as error:
        pytest.fail(f"the server refuses {text!r}: {error}")
    ours: list[bool] | None = []
    theirs: list[bool] | None = None
    try:
        ours = [filter_.matches(row.new) for row in rows]
    except RowFilterError:
        ours = None
    try:
        theirs = [bool(passes) for (passes,) in database.fetch(f"SELECT ({text}) FROM t ORDER BY id")]
    except (psycopg.errors.DataError, psycopg.errors.FeatureNotSupported):
        # the second: NaN to an integer
        theirs = None
    if ours != theirs:
        pytest.fail(f"{text!r}: ours {ours}, the server's {theirs}")
    counts["evaluated alike" if ours is not None else "failed alike"] += 1


def _damaged(generator: Generator, text: str) -> str:
    choose = generator.random.choice
    tokens = TOKEN.findall(text)
    for _ in range(choose((0, 1, 1, 1, 2, 3))):
        place = generator.random.randrange(len(tokens))
        match choose(("drop", "repeat", "exchange", "replace", "insert", "insert", "bare")):
            case "drop":
                del tokens[place]
            case "repeat":
                tokens.insert(place, tokens[place])
            case "exchange":
                other = generator.random.randrange(len(tokens))
                tokens[place], tokens[other] = tokens[other], tokens[place]
            case "replace":
                tokens[place] = f" {choose(POOL)} "
            case "insert":
                tokens.insert(place, f" {choose(POOL)} ")
            case _:
                # without the parentheses that make the grouping plain
                tokens = [token for token in tokens if token not in {"(", ")"}]
        if not tokens:
            return ""
    return "".join(tokens)


def _table(database: Database, generator: Generator) -> tuple[Relation, list[Insert]]:
    """Make a table with values of all types; return it and its rows as the publisher sends them."""
    listed = ", ".join(f"{name} {type_}" for name, type_ in COLUMNS.items())
    database.execute(f"CREATE TABLE t ({listed}, PRIMARY KEY (id)); CREATE PUBLICATION whole FOR TABLE t")
    database.execute("SELECT pg_create_logical_replication_slot('mutated', 'pgoutput')")
    for number in range(ROWS):
        values = [f"'{generator.random.choice(VALUES[type_])}'" for name, type_ in COLUMNS.items() if name != "id"]
        values = [value if generator.random.random() < 0.85 else "NULL" for value in values]
        database.execute(f"INSERT INTO t VALUES ({number}, {', '.join(values)})")
    options = "'proto_version', '1', 'publication_names', 'whole'"
    messages = [
        decode(bytes(data))
        for (data,) in database.fetch(f"SELECT data FROM pg_logical_slot_get_binary_changes('mutated', NULL, NULL, {options})")
    ]
    database.execute("SELECT pg_drop_replication_slot('mutated')")
    (relation,) = [message for message in messages if isinstance(message, Relation)]
    return relation, [message for message in messages if isinstance(message, Insert)]
