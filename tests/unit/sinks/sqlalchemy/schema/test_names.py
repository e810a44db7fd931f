"""What tables are called in targets without schemas."""

from __future__ import annotations

import pytest
from sqlalchemy import make_url

from subscriber.interfaces import TableName
from subscriber.sinks.sqlalchemy.schema.names import folded_column, name_findings, target_name

SQLITE, MYSQL = (make_url(f"{driver}://").get_dialect()() for driver in ("sqlite", "mysql+asyncmy"))


def tables(*names: str) -> list[TableName]:
    return [TableName(*name.split(".")) for name in names]


def test_names() -> None:
    assert target_name(TableName("public", "t")) == "t"
    assert target_name(TableName("S x", 'T"')) == 'S x__T"'


def test_names_that_fall_together() -> None:
    (found,) = name_findings(tables("public.s__t", "s.t", "public.t"), SQLITE)
    assert found.severity == "error"
    assert found.message == 'tables "public.s__t" and "s.t" would both be table "s__t" in the target'


def test_case_counts_where_the_target_tells_it_apart() -> None:
    (found,) = name_findings(tables("public.t", "public.T"), SQLITE)
    assert 'table "T"' in found.message
    assert name_findings(tables("public.t", "public.T"), MYSQL) == []
    assert len(name_findings(tables("public.t", "public.T"), MYSQL, caseless=True)) == 1


@pytest.mark.parametrize(
    ("dialect", "equal", "different"),
    [
        ("sqlite", ["aZ", "Az"], ["é", "É", "e"]),
        ("mysql", ["éA", "Éa"], ["e", "é", "o", "ø"]),
        ("oracle", ["a", "A"], ["e", "é"]),
    ],
)
def test_names_of_columns_that_a_target_does_not_distinguish(dialect: str, equal: list[str], different: list[str]) -> None:
    assert len({folded_column(name, dialect) for name in equal}) <= 1
    assert len({folded_column(name, dialect) for name in different}) == len(different)


def test_names_that_are_too_long() -> None:
    fits, does_not = f"s.{'t' * 61}", f"s.{'t' * 62}"
    (found,) = name_findings(tables(fits, does_not), MYSQL)
    assert found.message.startswith(f'table "{does_not}" would be table "s__ttt')
    assert found.message.endswith("where names have at most 64 characters")
    assert name_findings(tables(does_not), SQLITE) == []


def test_names_of_our_own_tables() -> None:
    (found,) = name_findings(tables("public.subscriber_position", "public.subscriber_mine"), SQLITE)
    assert '"public.subscriber_position"' in found.message
    assert found.hint == "leave it out of the publication, or rename it on the publisher"


def test_names_of_tables_that_come_and_go() -> None:
    """The bug was that a replicated table of the name of a staging table was dropped as one."""
    found = name_findings(tables("public.subscriber_copy_16390", "public.Subscriber_Bulk_1", "public.subscriber_copy_of_t"), SQLITE)
    assert [finding.message.split()[1] for finding in found] == ['"public.subscriber_copy_16390"', '"public.Subscriber_Bulk_1"']
