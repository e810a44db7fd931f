"""What a run waits for before the first change, in its log."""

from __future__ import annotations

import contextlib

from tests.support.database import Database
from tests.support.program import running
from tests.support.sqlalchemy_targets import ALL, native_target, replica_of


def test_a_transaction_that_a_slot_waits_for(publisher18_db: Database, target_db: Database) -> None:
    pair = replica_of(publisher18_db, native_target(target_db))
    with contextlib.closing(publisher18_db.connect(application_name="writes for long")) as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2000, 'not committed')")
        with running(*pair.arguments()) as program:
            program.says(
                "its creation waits for the end of transactions that were writing on the publisher: the session with PID ",
            )
            program.says(f'PID {writer.info.backend_pid} (application "writes for long", idle in transaction')
            writer.execute("COMMIT")
            pair.target.follows()
            pair.target.wait(ALL, pair.publisher.fetch(ALL))
