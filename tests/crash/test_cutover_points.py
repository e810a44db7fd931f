"""A cutover and a rollback end at every crash point, and so does the undo of each. A kill is an exception that nothing catches.

:mod:`tests.crash.test_cutover_kills` kills processes and servers, while writers try all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence

import pytest

from subscriber import ConfigurationError, crash_points
from subscriber.subscription.cutover.cutover import abort_cutover, cutover, roll_back
from tests.integration.subscription.test_cutover import QUICKLY, again, moving, writes
from tests.integration.subscription.test_cutover_faults import Killed
from tests.support.database import Database
from tests.support.examples import some_and_others
from tests.support.managed import catch_up, launched

ROW = "INSERT INTO t (v) VALUES ('w')"


async def killed(work: Callable[[], Awaitable[object]], point: int) -> Sequence[str]:
    """Let it reach so many points. Return their names; empty: it ended before."""
    names = list[str]()

    def kill(name: str) -> None:
        if name.startswith("cutover."):
            names.append(name)
            if len(names) >= point:
                # also when it begins to undo
                raise Killed

    try:
        with crash_points.watched(kill):
            await work()
    except Killed:
        return names[:point]
    return ()


@pytest.mark.crash
@pytest.mark.timeout(600)
@some_and_others(
    ["direction", "first", "step", "each"],
    [("forward", 11, 8, 6), ("back", 19, 8, 9)],
    [("forward", 3, 8, 3), ("back", 3, 8, 3), ("forward", 1, 2, 1), ("back", 1, 2, 1)],
)
async def test_every_point_of_a_move_and_of_its_undo(
    direction: str, first: int, step: int, each: int, publisher18_db: Database, target_db: Database
) -> None:
    """The move ends at points ``first``, ``first + step``, … The undo, and what is behind the point of no return, in steps of ``each``."""
    async with moving(publisher18_db, target_db) as name, launched(publisher18_db):
        source, destination = publisher18_db, target_db

        async def forward() -> None:
            await cutover(name, target=target_db.dsn, options=QUICKLY)

        async def back() -> None:
            await roll_back(name, target=target_db.dsn)

        async def undo() -> None:
            await abort_cutover(name, target=target_db.dsn)

        def closed() -> int:
            """How many of the two take no writes."""
            return sum(not writes(each) for each in (publisher18_db, target_db))

        move = forward
        if direction == "back":
            await forward()
            source, destination, move = target_db, publisher18_db, back
        again(publisher18_db, target_db)
        # the point after a step, and that before the next one, are the same state
        for point in itertools.count(first, step):
            reached = await killed(move, point)
            assert reached, "it ended without the point of no return"
            if "cutover.left" in reached:
                break
            # before the first rollback or the first failed switch command, the destination is open when the source is
            assert closed() >= (direction == "back")
            if point == 19:
                # the way back is made: its undo ends at each of its own points, too
                for left in itertools.count(1, each):
                    if not await killed(undo, left):
                        break
                    assert closed() >= (direction == "back")
            else:
                await undo()
            assert writes(source, query=ROW)
        assert not writes(source)
        with pytest.raises(ConfigurationError, match="writers were let into"):
            await undo()
        point = 1
        # the last point is after the end: a call more finds nothing to do
        with contextlib.suppress(ConfigurationError):
            while await killed(move, point):
                assert not writes(source, query=ROW)
                point += each
        assert point > 4
        again(publisher18_db, target_db)
        assert (writes(source, query=ROW), writes(destination, query=ROW)) == (False, True)
        subscription = f"{name}_back" if direction == "forward" else name
        await asyncio.to_thread(catch_up, destination, source, subscription)
        rows = "SELECT * FROM t ORDER BY id"
        assert source.fetch(rows) == destination.fetch(rows)
