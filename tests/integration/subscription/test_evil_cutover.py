"""Rows of a cutover that another program has written never decide what is executed, or what SQL is printed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from subscriber import SubscriberError, crash_points
from subscriber.protocol.quoting import quote_literal
from subscriber.subscription.cutover.cutover import abort_cutover, complete_cutover, cutover, roll_back
from subscriber.subscription.cutover.options import CutoverOptions
from tests.integration.subscription.test_cutover import again, moving, own_fence
from tests.integration.subscription.test_cutover_faults import Killed
from tests.support.database import Database


async def test_evil_rows_run_no_command_and_print_no_sql(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    reached = itertools.count()

    def evil(**values: object) -> None:
        again(publisher18_db, target_db)
        changes = ", ".join(f"{name} = {quote_literal(str(value))}" for name, value in values.items())
        publisher18_db.execute("SET default_transaction_read_only = off")
        publisher18_db.execute(f"UPDATE subscriber.fence SET {changes}")

    def kill(point: str) -> None:
        # at the beginning of "drain", the fourth step
        if point == "cutover.step" and next(reached) >= 7:
            raise Killed

    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(Killed), crash_points.watched(kill):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none"))
        evil(kind=f"command:touch {ran}")
        for act in (cutover, abort_cutover):
            with pytest.raises(SubscriberError, match="names an unknown kind of fence"):
                await act(name, target=target_db.dsn)
        evil(kind="read-only", details="touch")
        for act in (cutover, abort_cutover):
            with pytest.raises(SubscriberError, match=r"subscriber\.fence has a row of another program"):
                await act(name, target=target_db.dsn)
        # a command is taken for the fact that there was one
        slot = {"slot": name, "way_back": True}
        evil(details=json.dumps({**slot, "switch": f"touch {ran}"}))
        with pytest.raises(SubscriberError, match="has a switch command, which is not stored"):
            await cutover(name, target=target_db.dsn)
        await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch=""))
        # nor do options of a row become those of a rollback
        command = {"switch": f"touch {ran}"}
        evil(details=json.dumps({**slot, **command, "kept": command}))
        with pytest.raises(SubscriberError, match="had a switch command, which is not stored"):
            await roll_back(name, target=target_db.dsn)
        # what opens the old database is printed for people to run
        evil(before=json.dumps("off'; DROP DATABASE app; --"))
    opens = await complete_cutover(name, target=target_db.dsn)
    assert opens is not None
    assert "SET default_transaction_read_only = 'off''; DROP DATABASE app; --'" in opens
    assert not ran.exists()


async def test_evil_row_of_a_fence_runs_no_command(publisher18_db: Database, tmp_path: Path) -> None:
    fence = own_fence(publisher18_db)
    await fence.bar("read-only", "1")
    publisher18_db.reconnect()
    publisher18_db.execute("SET default_transaction_read_only = off")
    publisher18_db.execute(f"UPDATE subscriber.fence SET kind = 'command:touch {tmp_path}/ran'")
    with pytest.raises(SubscriberError, match="names an unknown kind of fence"):
        await fence.open("barred")
    assert not (tmp_path / "ran").exists()
    publisher18_db.execute("UPDATE subscriber.fence SET kind = 'read-only'")
    assert await fence.open("barred")
    publisher18_db.reconnect()
