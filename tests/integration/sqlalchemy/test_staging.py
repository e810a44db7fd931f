"""The staging table of a copy into a table that has rows."""

from __future__ import annotations

import pymysql
import pytest

from tests.support.database import Database
from tests.support.mariadb_database import MariaDatabase
from tests.support.program import subscriber
from tests.support.sqlalchemy_targets import ALL, OtherTarget, replica_of


def test_server_that_requires_keys(publisher18_db: Database, mariadb_db: MariaDatabase) -> None:
    """The bug was that MySQL refused it under ``sql_require_primary_key``, and the copy never ended. MariaDB has such a setting too."""
    mariadb_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    mariadb_db.execute("INSERT INTO t VALUES (-1, 'before')")
    pair = replica_of(publisher18_db, OtherTarget("mariadb", mariadb_db.url, mariadb_db.fetch, mariadb_db.execute))
    mariadb_db.execute("SET GLOBAL innodb_force_primary_key = ON")
    try:
        with pytest.raises(pymysql.err.DatabaseError):
            mariadb_db.execute("CREATE TABLE keyless (id int)")
        done = subscriber(*pair.arguments("--until-caught-up"))
    finally:
        mariadb_db.execute("SET GLOBAL innodb_force_primary_key = OFF")
    assert done.status == 0, done.errors
    assert mariadb_db.fetch(ALL) == [(-1, "before"), *publisher18_db.fetch(ALL)]
