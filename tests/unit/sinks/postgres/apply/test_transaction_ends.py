"""What the PostgreSQL sink sends at the end of a transaction: the position, the replication origin, COMMIT or PREPARE TRANSACTION."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.apply_counters import Tally
from subscriber.sinks.postgres.apply.applier import BEGIN, Applier, Owner
from subscriber.sinks.postgres.apply.change_sql import set_role
from subscriber.sinks.postgres.session.origins import grant, limit_setting, origin_name, parallel_origin
from tests.unit.sinks.postgres.recording import FixedTables, RecordingPipeline, Sent, transaction

POSITION = (
    'WITH moved AS (UPDATE subscriber."position" SET remote_lsn = $1 WHERE srsubid = $2 AND srrelid = $3 RETURNING 1) '
    "SELECT 1 / pg_catalog.count(*) FROM moved"
)
ORIGIN = "SELECT pg_catalog.pg_replication_origin_xact_setup($1, $2)"
WAL = "SELECT pg_catalog.pg_current_wal_insert_lsn()"
# the publisher's commit time 0 as a binary timestamptz
ORIGIN_VALUES = [b"0/1030", bytes(8)]


def session(*, origin: int | None, durable: bool) -> Any:
    return SimpleNamespace(origin=origin, commits_are_durable=durable, commit_timestamps=False)


def applier(owner: Owner) -> Applier:
    relations = cast("Any", FixedTables([]))
    return Applier(cast("Any", None), relations, owner, position=Lsn(0), tally=cast("Tally", None), committed=lambda *_: None)


def sent_at_commit(owner: Owner, *, origin: int | None = None, durable: bool = True) -> list[Sent]:
    pipeline = RecordingPipeline()
    applier(owner).send_commit(cast("Any", pipeline), transaction(), session(origin=origin, durable=durable))
    return pipeline.sent


def test_commit_moves_the_position() -> None:
    moved, committed = sent_at_commit(Owner(16384))
    assert (moved.sql, moved.values, moved.formats) == (POSITION, [b"0/1030", b"16384", b"0"], None)
    assert (moved.statement.parameter_types, moved.statement.reused) == ((3220, 26, 26), True)
    assert (committed.sql, committed.values) == ("COMMIT", [])


def test_commit_of_a_table_synchronization_moves_the_position_of_the_table() -> None:
    moved, _ = sent_at_commit(Owner(16384, 16400))
    assert moved.values == [b"0/1030", b"16384", b"16400"]


def test_commit_sets_the_origin_before_it() -> None:
    _, origin, committed = sent_at_commit(Owner(16384), origin=3)
    assert (origin.sql, origin.values, origin.formats) == (ORIGIN, ORIGIN_VALUES, [0, 1])
    assert (origin.statement.parameter_types, committed.sql) == ((3220, 1184), "COMMIT")


def test_commit_that_is_not_durable_asks_for_the_wal_position() -> None:
    assert [one.sql for one in sent_at_commit(Owner(1), durable=False)] == [POSITION, "COMMIT", WAL]


@pytest.mark.parametrize("origin", [None, 3])
def test_prepare_stores_the_proof_and_moves_no_position(origin: int | None) -> None:
    pipeline = RecordingPipeline()
    applier(Owner(16384)).send_prepare(cast("Any", pipeline), transaction(), "pg_gid_16384_700", session(origin=origin, durable=False))
    proof, *origins, prepared = pipeline.sent
    assert proof.sql == "INSERT INTO subscriber.prepared_transaction (srsubid, xid, gid, prepare_end_lsn) VALUES ($1, $2, $3, $4)"
    assert proof.values == [b"16384", b"700", b"pg_gid_16384_700", b"0/1030"]
    assert [(one.sql, one.values) for one in origins] == ([(ORIGIN, ORIGIN_VALUES)] if origin else [])
    assert (prepared.sql, prepared.values) == ("PREPARE TRANSACTION 'pg_gid_16384_700'", [])


def test_begin_and_roles() -> None:
    assert BEGIN.sql == b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
    assert set_role('a"b').sql == b'SET LOCAL ROLE "a""b"'
    assert set_role(None).sql == b"SET LOCAL ROLE NONE"


def test_names_of_origins() -> None:
    assert origin_name(5) == "subscriber_5"
    assert origin_name(5, 7) == "subscriber_5_7"
    assert origin_name(5, 7, 0) == "subscriber_5_7_0"
    assert parallel_origin(5, 2) == "subscriber_5_parallel_2"
    assert (Owner(5).origin, Owner(5, 7).origin) == ("pg_5", "pg_5_7")


def test_hints_about_origins_fit_the_servers_version() -> None:
    assert grant("r", 140000) == (
        "GRANT EXECUTE ON FUNCTION pg_catalog.pg_replication_origin_create(text), pg_catalog.pg_replication_origin_drop(text), "
        "pg_catalog.pg_replication_origin_session_reset(), pg_catalog.pg_replication_origin_session_setup(text), "
        'pg_catalog.pg_replication_origin_xact_setup(pg_lsn, timestamptz) TO "r"'
    )
    assert "superuser" in grant("r", 139999)
    assert [limit_setting(version) for version in (170000, 180000)] == ["max_replication_slots", "max_active_replication_origins"]
