"""Names of types and quoted names, as the publisher's own functions print them."""

from __future__ import annotations

import pytest

from subscriber.plugins.names import format_type, format_type_with_typemod, quote_identifier
from subscriber.protocol.capabilities import capabilities
from subscriber.protocol.quoting import quote_literal
from subscriber.types import TypeRegistry
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.type_reader import type_facts
from tests.support import every_type
from tests.support.database import Database

MODIFIED = """
CREATE TABLE app.modified (
    a bit(3), b bit varying(7), c char(4), d bpchar, e varchar(9), f numeric(5, 2), g numeric(7)[], h time(3), i timetz(0), j timestamp(2),
    k timestamptz(6)[], l interval year, m interval day to second(3), n interval(2), o interval second(0), p "bit",
    q interval hour to minute, r interval month, s interval year to month, t interval minute to second, u varchar[], v bit(3)[])
"""


@pytest.mark.publisher(min=14, lacks="some of the types")
@pytest.mark.matrix
async def test_types(publisher_db: Database, publisher_version: int) -> None:
    publisher_db.execute(every_type.SETUP)
    every_type.create_table(publisher_db, "every")
    publisher_db.execute(MODIFIED)
    with publisher_db.connect(options="-c search_path=") as session:
        columns = session.execute("""
            SELECT attname, atttypid::int8, atttypmod, format_type(atttypid, NULL), format_type(atttypid, atttypmod) FROM pg_attribute
             WHERE attrelid IN ('app.every'::regclass, 'app.modified'::regclass) AND attnum > 0
        """).fetchall()
    types, publisher = TypeRegistry(), capabilities(publisher_version * 10000)
    async with await WalReceiverConnection.connect(publisher_db.dsn, application_name="types") as connection:
        types.add(await type_facts(connection, {oid for _, oid, *_ in columns}))
    assert len(columns) > 200
    for name, oid, modifier, plain, modified in columns:
        assert (name, format_type(oid, types, publisher)) == (name, plain)
        assert (name, format_type_with_typemod(oid, modifier, types, publisher)) == (name, modified)


@pytest.mark.matrix
def test_quoting(publisher_db: Database, publisher_version: int) -> None:
    names = [name for (name,) in publisher_db.fetch("SELECT word FROM pg_get_keywords()")]
    names += ["a", "A", "_1", "1a", 'q"q', "a b", "ü", "a$", "$"]
    literals = ["", "'", "\\", "a\\'b", "ü"]
    with publisher_db.connect() as session:
        for name in names:
            row = session.execute("SELECT quote_ident(%s)", [name]).fetchone()
            assert row == (quote_identifier(name, capabilities(publisher_version * 10000)),)
        for text in literals:
            assert session.execute("SELECT quote_literal(%s)", [text]).fetchone() == (quote_literal(text),)
