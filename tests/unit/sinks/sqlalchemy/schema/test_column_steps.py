"""The steps that rename and add columns: each can be the last one before a crash, stored or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, Text
from sqlalchemy.dialects import mysql
from sqlalchemy.types import NullType, TypeEngine

from subscriber.errors import RelationError
from subscriber.interfaces import AddColumn, ChangeType, ColumnPlan, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.schema.column_steps import AddColumns, Drop, Found, Redefine, Rename, places, steps, with_target
from subscriber.sinks.sqlalchemy.schema.reflection import ReflectedTable
from subscriber.transaction.column_history import KnownColumn, KnownColumns

NAME = TableName("public", "t")


def known(*names: str) -> KnownColumns:
    columns = tuple(KnownColumn(number, name, "integer", 1, Lsn(1)) for number, name in enumerate(names, start=1))
    return KnownColumns(1, Lsn(1), len(names), columns, Lsn(1), tuple(range(1, len(names) + 1)), ())


def table(*names: str, kind: TypeEngine[object] | None = None, required: frozenset[str] = frozenset()) -> ReflectedTable:
    return ReflectedTable(Table("t", MetaData(), *(Column(name, kind or Integer()) for name in names)), required=required)


def left(stored: KnownColumns, plan: ColumnPlan, there: ReflectedTable, dialect: str = "sqlite") -> list[object]:
    return list(steps(stored, plan, NAME, there, dialect=dialect, created=lambda _: BigInteger()))


def plan_of(stored: KnownColumns, names: list[str], **more: object) -> ColumnPlan:
    renamed = {each.name: new for each, new in zip(stored.columns, names, strict=True) if each.name != new}
    columns = tuple(replace(each, name=new) for each, new in zip(stored.columns, names, strict=True))
    return replace(ColumnPlan(replace(stored, columns=columns), renamed=renamed), **more)  # type: ignore[arg-type]


NAMES = ("a", "b", "c", "d", "e", "A")


@given(st.permutations(NAMES), st.permutations(NAMES), st.lists(st.booleans(), max_size=12), st.sampled_from(["sqlite", "mariadb"]))
def test_renames_survive_crashes(old: list[str], new: list[str], crashes: list[bool], dialect: str) -> None:
    """A crash follows a step before its names are stored, or after it."""
    before, after = old[:4], new[:4]
    if any(len({name.lower() for name in each}) < len(each) for each in (before, after)):
        return
    crashes = list(crashes)
    stored = with_target(known(*before), table(*before), learned=True)
    plan = plan_of(stored, after)
    # the names that the columns have now, by number
    names = dict(enumerate(before, start=1))
    for _ in range(30):
        found = left(stored, plan, table(*names.values()), dialect)
        if not found:
            break
        for step in found:
            if isinstance(step, Found):
                stored = step.known
                continue
            assert isinstance(step, Rename)
            assert step.new.lower() not in {name.lower() for name in names.values() if name != step.old}, "the name is taken"
            (number,) = [number for number, name in names.items() if name == step.old]
            names[number] = step.new
            crashed, saved = (True, crashes.pop()) if crashes else (False, True)
            if saved:
                stored = step.known
            if crashed:
                break
    assert list(names.values()) == after


def test_what_blocks() -> None:
    stored = with_target(known("a", "b"), table("a", "b", "own"), learned=True)
    with pytest.raises(RelationError, match='another column "own"'):
        left(stored, plan_of(stored, ["own", "b"]), table("a", "b", "own"))
    with pytest.raises(RelationError, match='another column "own"'):
        left(stored, plan_of(stored, ["OWN", "b"]), table("a", "b", "own"))
    added = plan_of(stored, ["a", "b"], added=(AddColumn("own", "integer"),))
    with pytest.raises(RelationError, match='another column "own"'):
        left(stored, added, table("a", "b", "own"))
    # one that was added by hand meanwhile is taken
    added = plan_of(stored, ["a", "b"], added=(AddColumn("new", "integer"),))
    assert left(stored, added, table("a", "b", "own", "new")) == []
    assert left(stored, added, table("a", "b", "own")) == [AddColumns({"new": None})]


def test_a_dropped_column_keeps_its_number() -> None:
    stored = with_target(known("a", "b"), table("a", "b"), learned=True)
    plan = ColumnPlan(replace(stored, columns=stored.columns[1:]), dropped=("a",))
    assert left(stored, plan, table("a", "b")) == []
    assert left(stored, plan, table("a", "b", required=frozenset({"a"}))) == [Redefine("a", None)]
    assert plan.known is not None
    after = with_target(plan.known, table("a", "b"))
    assert dict(after.target) == {2: "b", 1: "a"}
    assert places(after, {}, table("b")) == {2: "b"}


def test_a_column_is_dropped() -> None:
    """Before another one gets its name; also if a crash follows before that is stored."""
    stored = with_target(known("a", "b", "c"), table("a", "b", "c", "own"), learned=True)
    columns = (replace(stored.columns[1], name="a"), stored.columns[2], KnownColumn(4, "b", "integer", 1, Lsn(1)))
    plan = ColumnPlan(replace(stored, columns=columns), ("a",), {"b": "a"}, (), (AddColumn("b", "integer"),), drop=True)
    drop, rename, add = left(stored, plan, table("a", "b", "c", "own"))
    assert isinstance(drop, Drop)
    assert isinstance(rename, Rename)
    assert (drop.name, rename.old, rename.new, add) == ("a", "b", "a", AddColumns({"b": None}))
    assert dict(drop.known.target) == {2: "b", 3: "c", 0: "own"}
    there = table("b", "c", "own")
    found, rename, add = left(stored, plan, there)
    assert (isinstance(found, Found) and found.known.target, left(drop.known, plan, there)) == (drop.known.target, [rename, add])
    # by another name in the target it is still the same
    stored = replace(stored, target=((1, "x"), (2, "b"), (3, "c")))
    assert str(left(stored, plan, table("x", "b", "c"))[0]) == 'column "x" is to be dropped'


@pytest.mark.parametrize(
    ("old", "new", "present", "created", "dialect", "wanted"),
    [
        ("integer", "bigint", mysql.INTEGER(), mysql.BIGINT(), "mariadb", True),
        ("integer", "bigint", mysql.BIGINT(), mysql.BIGINT(), "mariadb", False),
        ("bigint", "integer", mysql.BIGINT(), mysql.INTEGER(), "mariadb", False),
        ("integer", "bigint", Integer(), Integer(), "sqlite", False),
        ("integer", "numeric", mysql.INTEGER(), mysql.LONGTEXT(), "mariadb", True),
        ("integer", "numeric", mysql.DECIMAL(30, 0), mysql.LONGTEXT(), "mariadb", False),
        ("integer", "numeric", Integer(), Text(), "sqlite", True),
        ("integer", "numeric", Text(), Text(), "sqlite", False),
        ("integer", "numeric", NullType(), Text(), "sqlite", None),
        ("numeric(9,2)", "numeric(12,2)", mysql.DECIMAL(9, 2), mysql.DECIMAL(12, 2), "mariadb", True),
        ("numeric(9,2)", "numeric(12,2)", mysql.DECIMAL(20, 5), mysql.DECIMAL(12, 2), "mariadb", False),
        ("numeric(9,2)", "numeric", mysql.DECIMAL(9, 2), mysql.LONGTEXT(), "mariadb", True),
        ("numeric(9,2)", "numeric(9,1)", mysql.DECIMAL(9, 2), mysql.DECIMAL(9, 1), "mariadb", None),
        ("character varying(9)", "character varying(20)", mysql.VARCHAR(9), mysql.VARCHAR(20), "mariadb", True),
        ("character varying(9)", "text", mysql.VARCHAR(9), mysql.LONGTEXT(), "mariadb", True),
        ("character varying(9)", "text", mysql.LONGTEXT(), mysql.LONGTEXT(), "mariadb", False),
        ("character varying(9)", "text", Text(), Text(), "sqlite", False),
        ("real", "double precision", mysql.DOUBLE(), mysql.DOUBLE(), "mariadb", None),
        ("date", "timestamp without time zone", Text(), Text(), "sqlite", None),
    ],
)
def test_types(old: str, new: str, present: TypeEngine[object], created: TypeEngine[object], dialect: str, wanted: bool | None) -> None:
    """None: an error."""
    stored = with_target(known("a"), table("a"), learned=True)
    plan = plan_of(stored, ["a"], retyped=(ChangeType("a", old, new),))
    found = steps(stored, plan, NAME, table("a", kind=present), dialect=dialect, created=lambda _: created)
    if wanted is None:
        with pytest.raises(RelationError, match=r"--resync|may need other values"):
            list(found)
    else:
        assert list(found) == ([Redefine("a", created)] if wanted else [])
