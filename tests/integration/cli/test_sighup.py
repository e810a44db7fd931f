"""SIGHUP ends no program that runs on; without a configuration file and a log file it has no effect."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

from tests.support.database import Database
from tests.support.program import running, subscriber


def test_sighup_is_ignored(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR ALL TABLES")
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    source, lake = [f"--connection={publisher18_db.dsn}", "--publication=p"], tmp_path / "lake"
    assert subscriber("create", "created", *source, f"--target={target_db.dsn}").status == 0
    with ExitStack() as stack:
        launcher = stack.enter_context(running("-v", "run", f"--target={target_db.dsn}"))
        follower = stack.enter_context(running("-v", "run", *source, f"--target=spark://{lake}"))
        tail = stack.enter_context(running("-v", "tail", *source, "--slot=tailed"))
        follower.says("starts at")  # the lake exists
        applier = stack.enter_context(running("-v", "spark-apply", str(lake), "--engine=local"))
        programs = [launcher, follower, tail, applier]
        publisher18_db.wait("SELECT count(*) FROM pg_replication_slots WHERE active AND NOT temporary", 3)
        applier.says("published")
        for program in programs:
            program.send(signal.SIGHUP)
        before = applier.errors.count("published")
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        target_db.wait("SELECT count(*) FROM t", 1)
        applier.says("published", before + 1)
        publisher18_db.wait("SELECT bool_and(confirmed_flush_lsn > restart_lsn AND active) FROM pg_replication_slots", True)
        for program in programs:
            program.send(signal.SIGTERM)
        ended = [program.ended() for program in programs]
    assert [each.status for each in ended] == [0, 0, 0, 0]
    assert "insert public.t new=(id='1')" in ended[2].output
