"""How a relation of the publisher maps to a table of the target: columns by name, the key, and PostgreSQL's errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from subscriber.errors import RelationError
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable, map_relation
from tests.support.sink_postgres import Remote
from tests.unit.sinks.postgres.recording import EQUALS, ID, NUMBER, VALUE, column, table


def test_columns_are_matched_by_name() -> None:
    mapping = map_relation(Remote("t", "n", "*id").relation, table(columns=(ID, VALUE, NUMBER)))
    assert mapping.columns == (NUMBER, ID)
    assert (mapping.key, mapping.problem, mapping.identity) == (((1, EQUALS),), None, None)


@pytest.mark.parametrize(
    ("remote", "key", "indexes"),
    [
        (Remote("t", "*id", "v"), ("id",), (0,)),
        (Remote("t", "*id", "*v"), ("v",), (1,)),
        (Remote("t", "*v", "*id"), ("id", "v"), (1, 0)),
        (Remote("t", "id", "v", identity="f"), ("id",), (0,)),
        (Remote("t", "id", "v", identity="f"), (), None),
    ],
    ids=["key", "part of the publisher's key", "other order", "full with a key", "full without a key"],
)
def test_key_that_finds_rows(remote: Remote, key: tuple[str, ...], indexes: tuple[int, ...] | None) -> None:
    mapping = map_relation(remote.relation, table(key=key))
    assert mapping.key == (None if indexes is None else tuple((index, EQUALS) for index in indexes))
    mapping.require_updatable()


@pytest.mark.parametrize(
    ("remote", "key", "message"),
    [
        (
            Remote("t", "*id", "v"),
            ("v",),
            'publisher did not send replica identity column expected by the logical replication target relation "public.t"',
        ),
        (
            Remote("t", "*id", "v"),
            (),
            'logical replication target relation "public.t" has neither REPLICA IDENTITY index nor PRIMARY KEY column '
            "and published relation does not have REPLICA IDENTITY FULL",
        ),
    ],
)
def test_rows_that_cannot_be_found_prevent_updates_only(remote: Remote, key: tuple[str, ...], message: str) -> None:
    mapping = map_relation(remote.relation, table(key=key))
    with pytest.raises(RelationError) as caught:
        mapping.require_updatable()
    assert (str(caught.value), caught.value.sqlstate) == (message, "55000")
    assert caught.value.hint


def test_index_of_an_identity_column() -> None:
    always = column("n", identity_always=True)
    assert map_relation(Remote("t", "*id", "n").relation, table(columns=(ID, always))).identity == 1
    # one that is not replicated is set by its default
    assert map_relation(Remote("t", "*id").relation, table(columns=(ID, always))).identity is None


USABLE = table(columns=(ID, VALUE, column("g", generated=True)))


@pytest.mark.parametrize(
    ("target", "columns", "message", "sqlstate"),
    [
        (USABLE, ("id", "w"), 'logical replication target relation "public.t" is missing replicated column: "w"', "55000"),
        (USABLE, ("x", "w"), 'logical replication target relation "public.t" is missing replicated columns: "x", "w"', "55000"),
        (USABLE, ("id", "g"), 'logical replication target relation "public.t" has incompatible generated column: "g"', "55000"),
        (replace(USABLE, kind="v"), ("id",), 'cannot use relation "public.t" as logical replication target', "42809"),
        (
            replace(USABLE, rls_user="r"),
            ("id",),
            'user "r" cannot replicate into relation with row-level security enabled: "t"',
            "0A000",
        ),
        (
            replace(USABLE, barred="r"),
            ("id",),
            'role "r", the owner of the subscription, cannot SET ROLE to the owner of relation "public.t"',
            "42501",
        ),
        (
            replace(USABLE, rule="q"),
            ("id",),
            'rule "q" of logical replication target relation "public.t" applies to replicated changes',
            "55000",
        ),
    ],
    ids=["missing", "missing two", "generated", "view", "row security", "owner", "rule"],
)
def test_tables_that_do_not_fit(target: TargetTable, columns: tuple[str, ...], message: str, sqlstate: str) -> None:
    with pytest.raises(RelationError) as caught:
        map_relation(Remote("t", *columns).relation, target)
    assert (str(caught.value), caught.value.sqlstate) == (message, sqlstate)
    assert caught.value.hint
