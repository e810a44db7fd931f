"""No value of a row becomes part of a statement: pg_stat_activity and the log of a server show statements to other users."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from subscriber import TableName, repair, verify
from subscriber.verification import tables
from tests.conftest import Servers
from tests.integration.copy.test_resumed_copy import RESUMED, SETTINGS, interrupt
from tests.support.database import Database, given_publisher_version
from tests.support.replica import replica
from tests.support.row_gates import make_row_gate

VALUE = "5ec2e700"
"""Each key and each text has it."""
ROWS = 3000


class Statements:
    """The statements of both databases."""

    def __init__(self, databases: tuple[Database, ...], logs: tuple[Path, ...]) -> None:
        self._logs = {log: log.stat().st_size for log in logs}
        for database in databases:
            # without the values of parameters, and without the line that a COPY was at when it was interrupted
            for setting in ("log_statement = 'all'", "log_parameter_max_length = 0", "log_error_verbosity = terse"):
                database.execute(f'ALTER DATABASE "{database.name}" SET {setting}')

    @property
    def text(self) -> str:
        return "".join(log.read_bytes()[begin:].decode() for log, begin in self._logs.items())


@pytest.fixture
def statements(servers: Servers, publisher18_db: Database, target_db: Database) -> Statements:
    if given_publisher_version() is not None:
        pytest.skip("the log of a publisher from outside cannot be read")
    logs = tuple({servers.get(role, 18).log_file for role in ("publisher", "target")})
    return Statements((publisher18_db, target_db), logs)


async def test_no_value_of_a_row_is_in_a_statement(
    statements: Statements, publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # the bug was that resumed copies, verify and repair wrote keys into their queries
    monkeypatch.setattr(tables, "_RANGE_ROWS", 500)
    for database in (publisher18_db, target_db):
        database.execute('CREATE TABLE big (key uuid, "k$1%" text, n int NOT NULL, v text, PRIMARY KEY (key, "k$1%"))')
    mark = f"'{VALUE[:4]}' || '{VALUE[4:]}'"
    publisher18_db.execute(f"""
        INSERT INTO big SELECT (v || '-0000-0000-0000-' || lpad(i::text, 12, '0'))::uuid, v || '"'',\\' || i, i, v
          FROM generate_series(1, {ROWS}) AS i, LATERAL (SELECT {mark}) AS own(v);
        ANALYZE big; CREATE PUBLICATION pub FOR ALL TABLES
    """)
    make_row_gate(target_db, "big", f"NEW.n = {ROWS - 500}", 77)
    await interrupt(publisher18_db, target_db, 77)
    publisher18_db.execute("UPDATE big SET v = v || 'x' WHERE n IN (7, 300)")
    with caplog.at_level("INFO"):
        async with replica(publisher18_db, target_db, settings=SETTINGS) as found:
            everything = "SELECT * FROM big ORDER BY n"
            await found.same(everything)
            ((_, kept, copied),) = RESUMED.findall(caplog.text)
            assert int(kept) + int(copied) == ROWS
            assert int(kept) > 500
            compare = partial(verify, found.subscription.name, target=target_db.dsn, connection=publisher18_db.conninfo())
            assert (await compare()).equal
            target_db.execute("UPDATE big SET v = 'wrong' WHERE n = 20")
            report = await compare(changed=True)
            assert (report.tables[0].changed_only, len(report.tables[0].differences)) == (True, 1)
            target_db.execute("DELETE FROM big WHERE n = 30")
            report = await compare()
            assert len(report.tables[0].differences) == 2
            assert await repair(report, target=target_db.dsn) == {TableName("public", "big"): 2}
            await found.same(everything)
    assert "COPY (SELECT" in statements.text
    assert [line for line in statements.text.splitlines() if VALUE in line] == []
