"""Values of every type, copied and followed, with a key and without one (native's topic 002)."""

from __future__ import annotations

import pytest

from subscriber import ApplyError
from tests.integration.postgres.test_types import COLUMNS, SETUP
from tests.native.native import Nodes

COLUMN_LIST = ", ".join(f"{name} {sql_type}" for name, (sql_type, _) in COLUMNS.items())
# native finds no row by these: they have no equality
WITHOUT_EQUALITY = {"c_json", "c_jsonpath", "c_point"}
COMPARABLE = ", ".join(f"{name} {sql_type}" for name, (sql_type, _) in COLUMNS.items() if name not in WITHOUT_EQUALITY)


def literals(number: int, names: list[str]) -> str:
    return ", ".join(f"$v${COLUMNS[name][1][number]}$v$" for name in names)


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_every_type(nodes18: Nodes, binary: bool) -> None:
    names, comparable = list(COLUMNS), [name for name in COLUMNS if name not in WITHOUT_EQUALITY]
    nodes18.everywhere(f"""
        {SETUP};
        CREATE TABLE app.keyed (id int PRIMARY KEY, {COLUMN_LIST});
        CREATE TABLE app.by_row (id int, {COMPARABLE}); ALTER TABLE app.by_row REPLICA IDENTITY FULL;
        CREATE TABLE app.by_value (v app.mood, r int4range, d app.posint, p app.pair, a app.mood[], PRIMARY KEY (v, r, d, p, a));
    """)

    def add(first: int) -> str:
        rows = [(first + number, number) for number in (0, 1)]
        keyed = ", ".join(f"({key}, {literals(number, names)})" for key, number in rows)
        by_row = ", ".join(f"({key}, {literals(number, comparable)})" for key, number in rows)
        return f"""
            INSERT INTO app.keyed VALUES {keyed}; INSERT INTO app.by_row VALUES {by_row};
            INSERT INTO app.keyed (id, c_required) VALUES ({first + 2}, 'rest null');
            INSERT INTO app.by_row (id, c_required) VALUES ({first + 2}, '');
            INSERT INTO app.by_value VALUES ('ok', '[{first},{first + 5})', {first}, '({first},sad)', '{{happy,sad}}')
        """

    nodes18.publisher.execute(f"{add(10)}; {add(20)}; {add(30)}; CREATE PUBLICATION pub FOR TABLES IN SCHEMA app")
    async with nodes18.followed(binary=binary) as both:
        await both.equal()
        swapped = ", ".join(f"{name} = $v${COLUMNS[name][1][1]}$v$" for name in comparable)
        nodes18.publisher.execute(
            f"{add(40)}; UPDATE app.keyed SET {swapped}, c_json = '[]' WHERE id = 10; DELETE FROM app.keyed WHERE id = 21"
        )
        nodes18.publisher.execute(f"UPDATE app.by_row SET {swapped} WHERE id = 10; UPDATE app.by_row SET id = id + 100 WHERE id >= 40")
        nodes18.publisher.execute("DELETE FROM app.by_row WHERE id IN (20, 21, 22); UPDATE app.keyed SET id = -id")
        nodes18.publisher.execute("UPDATE app.by_value SET v = 'happy', d = d + 1 WHERE d > 20; DELETE FROM app.by_value WHERE d = 10")
        await both.equal()
        assert await both.value("SELECT count(*) FROM app.by_row") == 9
        assert await both.value("SELECT count(*) FROM app.by_value") == 3
        # a value that the type has only now
        nodes18.everywhere("ALTER TYPE app.mood ADD VALUE 'curious'")
        nodes18.publisher.execute("UPDATE app.keyed SET c_enum = 'curious', c_enums = '{curious,ok}', c_pair = '(1,curious)'")
        await both.equal()
        await both.assert_no_errors()


async def test_types_that_differ(nodes18: Nodes) -> None:
    """Texts fit if the target's type can read them; otherwise both stop until it can."""
    nodes18.publisher.execute("""
        CREATE TYPE mood AS ENUM ('ok', 'sad');
        CREATE TABLE t (id int PRIMARY KEY, number int, word text, at timestamptz, flag boolean, mood mood, list int[], doc json)
    """)
    nodes18.in_targets("""
        CREATE DOMAIN small AS text CHECK (length(value) < 10);
        CREATE TABLE t (id bigint PRIMARY KEY, number numeric(10, 2), word small, at text, flag text, mood text, list text[], doc jsonb)
    """)
    row = "VALUES ({}, {}, {}, '2024-02-29 12:00+02', true, 'sad', '{{1,2}}', '{{\"a\":  1}}')"
    nodes18.publisher.execute(f"INSERT INTO t {row.format(1, 7, repr('copied'))}; CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed() as both:
        nodes18.publisher.execute(
            f"INSERT INTO t {row.format(2, -7, repr('new'))}; UPDATE t SET number = number + 1, flag = NULL WHERE id = 1"
        )
        await both.equal(publisher=False)
        assert await both.rows("SELECT number::text, word, at, flag, mood, doc::text FROM t WHERE id = 2") == [
            ("-7.00", "new", "2024-02-29 10:00:00+00", "t", "sad", '{"a": 1}')
        ]
        nodes18.publisher.execute("INSERT INTO t (id, word) VALUES (3, 'longer than small')")
        await both.both_report('violates check constraint "small_check"', ApplyError)
        nodes18.in_targets("ALTER DOMAIN small DROP CONSTRAINT small_check")
        await both.equal(publisher=False)
        nodes18.publisher.execute("INSERT INTO t (id, number) VALUES (4, 1000000000)")
        await both.both_report("numeric field overflow", ApplyError, "numeric value out of range")
        nodes18.in_targets("ALTER TABLE t ALTER COLUMN number TYPE text")
        await both.equal(publisher=False)
        assert await both.value("SELECT number FROM t WHERE id = 4") == "1000000000"
