"""The catalog of this sink in the target database, as SQLAlchemy's ``Table`` objects.

Most of the tables are declared in :mod:`subscriber.catalog.model`. They are in the URL's database, and their names
begin with ``subscriber_``.

``version``
    one row: the catalog's version, a random number that identifies this target, and the counter for oids.
``pg_subscription``
    one row for each subscription. Its oid, and those of tables, come from ``version.next_oid`` and are never reused.
``fence``
    one row for each subscription: the fencing token, which each new writer increases. A transaction that writes anything of the
    subscription first locks this row, shared with other transactions of its writer, and compares the token.
    :mod:`subscriber.sinks.sqlalchemy.session.fence` explains how this stops earlier writers.
``pg_subscription_rel``
    the state of each table. Each added table gets a new number ``srrelid``; ``srnspname`` and ``srrelname`` are its name on the publisher.
    ``srcopy`` says how to undo an unfinished copy: ``d``: the rows were copied into the table itself, which was empty; ``s``: into the
    staging table.
``position``
    the position of the subscription (``srrelid`` 0), and of each table that catches up.
``prepared_transaction``, ``prepared_transaction_chunk``
    the publisher's prepared transactions, until their COMMIT PREPARED or ROLLBACK PREPARED. One counts only if it is ``complete``.
``received_prepare``
    the xids of these transactions. If the row of one is missing in ``prepared_transaction`` only, the transaction was lost.
``worker``
    the latest reports of the workers of a process, renewed about once a second. A report counts only while the writer's lock is held.
``subscription_stats``
    counters, and the last error.

LSNs are stored as PostgreSQL writes them (``16/B374D848``): the database compares them only for equality. Times are seconds since 1970.
There are no foreign keys: this program deletes all rows of a subscription together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
    literal,
    true,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

from subscriber.catalog import model
from subscriber.catalog.model import Kind
from subscriber.sinks.sqlalchemy.catalog_types import LsnText, Names

__all__ = [
    "FENCE",
    "FIRST_OID",
    "METADATA",
    "OF_SUBSCRIPTION",
    "PREFIX",
    "PREPARED_TABLES",
    "PREPARED_TRANSACTION",
    "TABLES",
    "VERSION",
    "VERSION_TABLE",
]

VERSION: Final = 1

PREFIX: Final = "subscriber_"
FIRST_OID: Final = 16384
"""The same as PostgreSQL's FirstNormalObjectId."""

# utf8mb4_bin: names are compared byte by byte; InnoDB: tables have transactions
_OPTIONS: Final[Mapping[str, Any]] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}

FENCE: Final = model.Table(
    "fence", model.Column("srsubid", Kind.OID), model.Column("token", Kind.INTEGER), key=("srsubid",), subscription="srsubid"
)
PREPARED_TRANSACTION: Final = model.Table(
    "prepared_transaction",
    model.Column("srsubid", Kind.OID),
    model.Column("xid", Kind.INTEGER),
    model.Column("gid", Kind.TEXT),
    model.Column("prepare_lsn", Kind.LSN),
    model.Column("prepare_end_lsn", Kind.LSN),
    model.Column("prepare_time", Kind.INTEGER),
    model.Column("origin_name", Kind.TEXT, null=True),
    model.Column("origin_lsn", Kind.LSN, null=True),
    model.Column("prefixed", Kind.BOOLEAN),
    model.Column("changes", Kind.INTEGER),
    model.Column("size", Kind.INTEGER),
    model.Column("complete", Kind.BOOLEAN),
    key=("srsubid", "xid"),
    subscription="srsubid",
)
_PREPARED_TRANSACTION_CHUNK: Final = model.Table(
    "prepared_transaction_chunk",
    model.Column("srsubid", Kind.OID),
    model.Column("xid", Kind.INTEGER),
    model.Column("number", Kind.INTEGER),
    key=("srsubid", "xid", "number"),
    subscription="srsubid",
)
_RECEIVED_PREPARE: Final = model.Table(
    "received_prepare", model.Column("srsubid", Kind.OID), model.Column("xid", Kind.INTEGER), key=("srsubid", "xid"), subscription="srsubid"
)

PREPARED_TABLES: Final = (_PREPARED_TRANSACTION_CHUNK, PREPARED_TRANSACTION, _RECEIVED_PREPARE)

OF_SUBSCRIPTION: Final = (
    model.PG_SUBSCRIPTION_REL.extended(model.Column("srcopy", Kind.CODE, null=True)),
    model.POSITION,
    *PREPARED_TABLES,
    model.WORKER.extended(
        model.Column("pid", Kind.INTEGER, null=True),
        model.Column("host", Kind.TEXT, null=True),
        model.Column("reported", Kind.TIME, null=True),
    ),
    model.SNAPSHOT_REQUEST,
    model.VERIFICATION,
    model.MIGRATION,
    model.SUBSCRIPTION_STATS,
    FENCE,
    model.PG_SUBSCRIPTION,
)
"""All tables that hold rows of a subscription; the subscription itself is the last."""

_TYPES: Final[Mapping[Kind, TypeEngine[Any]]] = {
    Kind.OID: BigInteger(),
    Kind.INTEGER: BigInteger(),
    Kind.REAL: Double(),
    Kind.TIME: Double(),
    Kind.BOOLEAN: Boolean(),
    Kind.CODE: String(1),
    Kind.NAME: String(63),
    Kind.TEXT: Text(),
    # MariaDB's TEXT holds 64 kB: too little for the names of hundreds of tables that are left out
    Kind.LONG_TEXT: Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb"),
    Kind.NAMES: Names(),
    Kind.LSN: LsnText(),
}


def _columns(table: model.Table) -> list[Column[Any]]:
    return [
        Column(
            column.name,
            String(column.length) if column.length else _TYPES[column.kind],
            nullable=column.null,
            unique=column.unique or None,
            primary_key=column.name in table.key,
            autoincrement=False,
            server_default=_literal(column.default),
        )
        for column in table.columns.values()
    ]


def _literal(value: Any) -> ColumnElement[Any] | None:
    if isinstance(value, bool):
        return true() if value else false()
    return None if value is None else literal(value)


METADATA: Final = MetaData()
"""Contains all tables. They are made once: to build them takes ten milliseconds, as much as some runs."""


def _table(name: str, *columns: Column[Any]) -> Table:
    made: Table = Table(PREFIX + name, METADATA, *columns, **_OPTIONS)
    return made


_FURTHER: Final = {
    "prepared_transaction_chunk": (Column("data", LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb"), nullable=False),)
}
TABLES: Final[Mapping[str, Table]] = {
    each.name: _table(each.name, *_columns(each), *_FURTHER.get(each.name, ())) for each in OF_SUBSCRIPTION
}
"""All tables except ``version``, by their names in the model."""
VERSION_TABLE: Final = _table(
    "version",
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("target_identifier", String(20), nullable=False),
    Column("next_oid", BigInteger, nullable=False),
)
