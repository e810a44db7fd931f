"""A MariaDB whose sessions begin with other values of every variable that could change what is replicated."""

from __future__ import annotations

from collections.abc import Callable

from subscriber import repair
from subscriber.testing.mariadb import EmbeddedMariaDB
from tests.integration.sqlalchemy.test_verify import TABLES, running, verified
from tests.support.database import Database
from tests.support.mariadb_database import fresh_mariadb_database
from tests.support.sqlalchemy_targets import OtherTarget

VARIABLES = {
    "autocommit": "0",
    "big_tables": "1",
    "character_set_client": "latin1",
    "character_set_connection": "latin1",
    "character_set_results": "latin1",
    "check_constraint_checks": "0",
    "collation_connection": "latin1_german2_ci",
    "completion_type": "2",
    "default_storage_engine": "MyISAM",
    "default_week_format": "3",
    "div_precision_increment": "0",
    "explicit_defaults_for_timestamp": "0",
    "foreign_key_checks": "0",
    "group_concat_max_len": "4",
    "idle_readonly_transaction_timeout": "2",
    "idle_transaction_timeout": "2",
    "idle_write_transaction_timeout": "2",
    "innodb_lock_wait_timeout": "1",
    "lc_time_names": "'de_DE'",
    "lock_wait_timeout": "1",
    "low_priority_updates": "1",
    "max_join_size": "1",
    "max_recursive_iterations": "1",
    "max_sort_length": "64",
    "max_statement_time": "2",
    "net_read_timeout": "2",
    "net_write_timeout": "2",
    "old_mode": "'NO_DUP_KEY_WARNINGS_WITH_IGNORE'",
    "sql_auto_is_null": "1",
    "sql_mode": "'ANSI,ORACLE,PAD_CHAR_TO_FULL_LENGTH,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT'",
    "sql_quote_show_create": "0",
    "sql_safe_updates": "1",
    "sql_select_limit": "1",
    "time_zone": "'+05:45'",
    "tx_isolation": "'SERIALIZABLE'",
    "tx_read_only": "1",
    "unique_checks": "0",
    "updatable_views_with_limit": "0",
    "wait_timeout": "2",
}


CHANGES = r"UPDATE t SET v = v || E'\\''' WHERE id < 100; DELETE FROM bag WHERE n = 1; INSERT INTO words VALUES (E'\\', 0)"


async def test_variables_of_the_server(publisher18_db: Database, make_mariadb: Callable[..., EmbeddedMariaDB]) -> None:
    publisher18_db.execute(TABLES)
    server = make_mariadb()
    with fresh_mariadb_database(server) as database:
        # the test's own session keeps the values that it has
        database.execute("SELECT 1")
        for name, value in VARIABLES.items():
            database.execute(f"SET GLOBAL {name} = {value}")
        target = OtherTarget("mariadb", database.url, database.fetch, database.execute)
        async with running(publisher18_db, target) as found:
            report = await verified(found, publisher18_db, target)
            assert report.equal, str(report.to_json())
            publisher18_db.execute(CHANGES)
            await found.wait_for(publisher18_db.current_lsn(), 30)
            report = await verified(found, publisher18_db, target)
            assert report.equal, str(report.to_json())
            database.execute("DELETE FROM t WHERE id % 5 = 0")
            database.execute("UPDATE words SET u = NULL WHERE u < 3")
            report = await verified(found, publisher18_db, target)
            assert not report.equal
            await repair(report, target=target.url)
            report = await verified(found, publisher18_db, target)
            assert report.equal, str(report.to_json())
        for name in VARIABLES:
            database.execute(f"SET GLOBAL {name} = DEFAULT")
