"""Rows of a cutover that another program has written never decide what is executed, or what SQL is printed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from subscriber import SubscriberError, TargetError, crash_points
from subscriber.protocol.quoting import quote_literal
from subscriber.subscription.cutover.cutover import abort_cutover, complete_cutover, cutover, roll_back
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.walreceiver.fences.fence import Fence
from tests.integration.subscription.test_cutover import again, moving
from tests.integration.subscription.test_cutover_faults import Killed
from tests.support.database import Database


async def test_evil_rows_run_no_command_and_print_no_sql(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    reached = itertools.count()

    def evil(step: str, details: object) -> None:
        text = quote_literal(json.dumps(details))
        target_db.execute("SET default_transaction_read_only = off")
        target_db.execute(f"UPDATE subscriber.cutover SET details = {text} WHERE step = '{step}'")

    def plan(**options: object) -> None:
        ((found,),) = target_db.fetch("SELECT details FROM subscriber.cutover WHERE step = 'plan'")
        known = json.loads(found)
        evil("plan", {**known, "options": {**known["options"], **options}})

    def kill(point: str) -> None:
        # at the beginning of "drain", the third step
        if point == "cutover.step" and next(reached) >= 7:
            raise Killed

    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(Killed), crash_points.watched(kill):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none"))
        again(publisher18_db, target_db)
        for options in ({"fence": f"command:touch {ran}"}, {"verify": "none", "unknown": 1}, {"max_lag": "1"}):
            ((before,),) = target_db.fetch("SELECT details FROM subscriber.cutover WHERE step = 'plan'")
            plan(**options)
            for act in (cutover, abort_cutover):
                with pytest.raises(TargetError, match="has options that this program does not know"):
                    await act(name, target=target_db.dsn)
            evil("plan", json.loads(before))
        # a command is taken for the fact that there was one
        plan(switch=f"touch {ran}")
        with pytest.raises(SubscriberError, match="has a switch command, which is not stored"):
            await cutover(name, target=target_db.dsn)
        with pytest.raises(SubscriberError, match="an earlier attempt was interrupted, and is undone now"):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(switch=""))
        await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none"))
        again(publisher18_db, target_db)
        plan(switch=f"touch {ran}")
        with pytest.raises(SubscriberError, match="had a switch command, which is not stored"):
            await roll_back(name, target=target_db.dsn)
        # what opened the old database was SQL of this row, printed for people to run
        ((oid,),) = target_db.fetch(f"SELECT oid FROM subscriber.pg_subscription WHERE subname = '{name}'")
        evil_sql = {"opens": "DROP DATABASE app", "closed": ["read-only", json.dumps("off'; DROP DATABASE app; --")]}
        text = quote_literal(json.dumps(evil_sql))
        target_db.execute(f"INSERT INTO subscriber.cutover VALUES ({oid}, 'complete', now(), NULL, {text})")
    opens = await complete_cutover(name, target=target_db.dsn)
    assert opens is not None
    assert "SET default_transaction_read_only = 'off''; DROP DATABASE app; --'" in opens
    assert not ran.exists()


async def test_evil_row_of_a_fence_runs_no_command(publisher18_db: Database, tmp_path: Path) -> None:
    user = publisher18_db.value("SELECT current_user")
    fence = Fence(publisher18_db.conninfo(), "ours", "the old database", slot="ours", others=[], roles=[user], names=[])
    await fence.close("read-only")
    publisher18_db.reconnect()
    publisher18_db.execute("SET default_transaction_read_only = off")
    publisher18_db.execute(f"UPDATE subscriber.fence SET kind = 'command:touch {tmp_path}/ran'")
    with pytest.raises(SubscriberError, match="names an unknown kind of fence"):
        await fence.open()
    assert not (tmp_path / "ran").exists()
    publisher18_db.execute("UPDATE subscriber.fence SET kind = 'read-only'")
    assert await fence.open()
    publisher18_db.reconnect()
