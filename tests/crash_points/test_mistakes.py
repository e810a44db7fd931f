"""The crash points find mistakes: each is planted, and a case reports it. Without the mistake the case passes, because it is of CASES."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from subscriber.testing.crash_points import CrashCase, Failure
from tests.crash_points import mistakes
from tests.crash_points.targets import make_target
from tests.crash_points.test_crash_points import CASES

_AHEAD: Final = r'replication slot "crash_point" was advanced to \S+, past position \S+ of the target: the changes in between are lost'

_TOO_OFTEN: Final = r'table "history": \d+ rows of the target are not on the publisher, or are there too often'
_MISSING: Final = r'table "{}": \d+ rows of the publisher are not in the target'

_FOUND: Final[list[tuple[Callable[[], None], str, CrashCase, str]]] = [
    (mistakes.acknowledge_before_apply, "postgres", CrashCase("apply.taken", Failure.EXIT), _AHEAD),
    (mistakes.acknowledge_commit_before_commit_prepared, "postgres", CrashCase("prepare.commit_taken", Failure.EXIT), _AHEAD),
    (mistakes.move_position_after_commit, "sqlite", CrashCase("spool.removed", Failure.EXIT), _TOO_OFTEN),
    (mistakes.trust_position_of_slot, "sqlite", CrashCase("sqlalchemy.committed", Failure.EXIT), _TOO_OFTEN),
    (mistakes.keep_rolled_back_savepoint, "sqlite", CrashCase("spool.written", Failure.EXIT), _TOO_OFTEN),
    (mistakes.forget_spool_of_killed_process, "sqlite", CrashCase("spool.written", Failure.EXIT), r"the spool has \w+"),
    (
        mistakes.name_prepared_transaction_by_process,
        "postgres",
        CrashCase("prepare.commit_taken", Failure.EXIT),
        r"the publisher committed prepared transaction .*, but the target never received its PREPARE",
    ),
    (mistakes.store_copied_rows_after_state, "sqlite", CrashCase("copy.finished", Failure.EXIT), _MISSING.format("history")),
    (mistakes.catch_up_one_transaction_late, "sqlite", CrashCase("copy.batch_applied", Failure.EXIT), _MISSING.format("history")),
    (mistakes.apply_again_what_a_table_has, "sqlite", CrashCase("copy.ready", Failure.EXIT), _TOO_OFTEN),
    (
        mistakes.write_manifest_before_files,
        "lake",
        CrashCase("landing.landed", Failure.EXIT),
        r"landing/\d+-\d+-\d+\.parquet is missing",
    ),
    (
        mistakes.publish_snapshot_before_commits,
        "lake",
        CrashCase(mistakes.PUBLISHED_BEFORE_COMMITS, Failure.EXIT),
        _MISSING.format("history"),
    ),
    (mistakes.forget_table_slot, "sqlite", CrashCase("copy.synchronized", Failure.EXIT), r"slots are left on the publisher: pg_\d+_sync_"),
]


@pytest.mark.crash_points
@pytest.mark.parametrize(("mistake", "sink", "case", "found"), [pytest.param(*row, id=row[0].__name__) for row in _FOUND])
async def test_mistake_is_found(
    mistake: Callable[[], None], sink: str, case: CrashCase, found: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert (sink, case) in CASES or case.point == mistakes.PUBLISHED_BEFORE_COMMITS
    with pytest.raises(AssertionError) as raised:
        await case.run(make_target(sink, request), tmp_path, mistake=mistake)
    assert re.search(found, str(raised.value))
