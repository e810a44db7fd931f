"""The staging table of a copy into a table that has rows."""

from __future__ import annotations

from subscriber.interfaces import TableName
from subscriber.sinks.sqlalchemy.copy.staging import Staging
from subscriber.sinks.sqlalchemy.schema.reflection import reflect_all
from subscriber.sinks.sqlalchemy.session.database import Database
from tests.support.mariadb_database import MariaDatabase


async def test_it_has_a_key(mariadb_db: MariaDatabase) -> None:
    """The bug was that MySQL with ``sql_require_primary_key = ON`` refused it, and the copy was tried for ever."""
    mariadb_db.execute("CREATE TABLE t (id int NOT NULL, v text)")
    database = Database(mariadb_db.url)
    try:
        async with database.writing() as connection:
            table = TableName("public", "t")
            await Staging(7).make(connection, (await reflect_all(connection, [table]))[table])
        keys = "SELECT column_name FROM information_schema.columns WHERE table_name = 'subscriber_copy_7' AND column_key = 'PRI'"
        assert mariadb_db.fetch(keys) == [("subscriber_staged_row",)]
    finally:
        await database.close()
