"""``python -m tests.benchmark.postgres.sets [ROWS]``: what a change costs by the way it is made, and by how many are made at once.

The ways are the statements that the program uses, one for each change (*each*) and one for a set (*unnest*), and others that it could use:

- *unnest, free*: the planner chooses the join. The program lets each row be found by the index.
- *copy*: INSERTs by COPY into the table; else COPY into a temporary table, which is joined as the planner likes.
- *merge*: MERGE with the arrays of *unnest*.

Given is the processor time of the backend and of this process together, in microseconds for a change. Each transaction has one set.
"""

from __future__ import annotations

import asyncio
import random
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psycopg
from psycopg import pq

from subscriber.interfaces import TableName
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import Column, Delete, Insert, Relation, TupleData, Update
from subscriber.sinks.postgres.apply.forms import Forms
from subscriber.sinks.postgres.apply.set_sql import elements
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.libpq_session import LibpqSession
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping, map_relation
from subscriber.sinks.postgres.tables.table_reader import read_table
from subscriber.testing.server import EmbeddedServer
from tests.benchmark.postgres.servers import SETTINGS
from tests.benchmark.postgres.workloads import NARROW

_ROWS: Final = 20_000
"""How many changes are made for each figure."""
_SETS: Final = 600
"""How many sets at most."""
_TABLE: Final = 100_000
_SIZES: Final = (1, 2, 4, 8, 16, 64, 256, 1000, 4000)
_COLUMNS: Final = {"id": 20, "a": 23, "b": 23, "c": 25}
_STAGE: Final = "CREATE TEMPORARY TABLE stage (id bigint, a int, b int, c text) ON COMMIT DELETE ROWS"
_BY_INDEX: Final = b"SELECT set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true)"
_FROM_STAGE: Final = {
    "UPDATE": b"UPDATE t SET a = s.a, b = s.b, c = s.c FROM stage AS s WHERE t.id = s.id",
    "DELETE": b"DELETE FROM t USING stage AS s WHERE t.id = s.id",
}
_MERGE: Final = {
    "INSERT": "MERGE INTO t USING (SELECT {}) AS u ON false WHEN NOT MATCHED THEN INSERT (id, a, b, c) VALUES (u.c0, u.c1, u.c2, u.c3)",
    "UPDATE": "MERGE INTO t USING (SELECT {}) AS u ON t.id = u.c0 WHEN MATCHED THEN UPDATE SET a = u.c1, b = u.c2, c = u.c3",
    "DELETE": "MERGE INTO t USING (SELECT {}) AS u ON t.id = u.c0 WHEN MATCHED THEN DELETE",
}
_OK: Final = {pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.COPY_IN}
_Values = Sequence[bytes | None]
_Sent = tuple[bytes, Statement | None, _Values, Sequence[int] | None]


class _Session:
    """A session, and the processor time of its backend."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self._pgconn = self.connection.pgconn
        self._prepared: dict[Statement, bytes] = {}
        self._schedule = Path(f"/proc/{self.connection.info.backend_pid}/schedstat")

    def cpu(self) -> float:
        """Seconds of the backend and of this process."""
        return int(self._schedule.read_text().split()[0]) / 1e9 + time.process_time()

    def run(self, *statements: _Sent) -> None:
        """Execute statements in one pipeline."""
        pgconn = self._pgconn
        pgconn.nonblocking = 1
        pgconn.enter_pipeline_mode()
        waited = 1
        for sql, statement, values, formats in statements:
            if statement is None:
                pgconn.send_query_params(sql, values or None, param_formats=formats)
            elif not statement.reused:
                pgconn.send_query_params(statement.sql, values, param_types=statement.parameter_types, param_formats=formats)
            else:
                name = self._prepared.get(statement)
                if name is None:
                    name = self._prepared[statement] = b"s%d" % len(self._prepared)
                    pgconn.send_prepare(name, statement.sql, statement.parameter_types)
                    waited += 1
                pgconn.send_query_prepared(name, values, formats)
            waited += 1
        pgconn.pipeline_sync()
        unsent = True
        while waited:
            unsent = unsent and pgconn.flush() == 1
            while not pgconn.is_busy() and waited:
                result = pgconn.get_result()
                if result is not None:
                    assert result.status in _OK, result.error_message
                    waited -= 1
            if waited:
                select.select([pgconn.socket], [pgconn.socket] if unsent else [], [])
                pgconn.consume_input()
        pgconn.exit_pipeline_mode()
        pgconn.nonblocking = 0

    def copy(self, table: str, rows: Sequence[_Values], *, columns: str = "id, a, b, c") -> None:
        """COPY rows into a table."""
        pgconn = self._pgconn
        assert pgconn.exec_(f"COPY {table} ({columns}) FROM STDIN".encode()).status in _OK
        pgconn.put_copy_data(b"".join([b"\t".join(row) + b"\n" for row in rows]))  # type: ignore[arg-type]
        pgconn.put_copy_end()
        while (result := pgconn.get_result()) is not None:
            assert result.status in _OK, result.error_message


_BEGIN: Final[_Sent] = (b"BEGIN", None, (), None)
_COMMIT: Final[_Sent] = (b"COMMIT", None, (), None)


class _Change(tuple[bytes | None, ...]):
    """The values of a change, and its message as the publisher sends it."""

    message: bytes


def _change(kind: str, number: int, seed: int) -> _Change:
    values = [b"%d" % number, b"%d" % (number % 1000 + seed), b"%d" % (number // 7), b"%032x" % (number * 7919 + seed)]
    change = _Change(values if kind != "DELETE" else (values[0], None, None, None))
    change.message = encode(_message(kind, values))
    return change


def _message(kind: str, values: list[bytes]) -> Insert | Update | Delete:
    row = TupleData(b"tttt", list(values))
    match kind:
        case "INSERT":
            return Insert(1, row)
        case "UPDATE":
            return Update(1, None, None, row)
    return Delete(1, TupleData(b"tnnn", [values[0], None, None, None]), None)


class _Ways:
    """The ways to make changes of one kind."""

    def __init__(self, session: _Session, mapping: RelationMapping, kind: str) -> None:
        self._session = session
        self._kind = kind
        self._form, _ = Forms(None).of(_message(kind, [b"1"] * 4), mapping, 1)
        assert self._form.together is not None
        self._together = self._form.together
        types = self._together.parameter_types[: len(self._form.arrays)]
        indexes = [index for index, _, _ in self._form.arrays]
        self._merge = Statement(_MERGE[kind].format(elements(mapping, indexes)).encode(), types, reused=kind == "INSERT")
        self.all: dict[str, Callable[[Sequence[_Change]], None]] = {
            "each": self._each,
            "unnest": self._unnest,
            "unnest, free": self._free,
            "copy": self._copy,
            "merge": self._merged,
        }

    def _each(self, rows: Sequence[_Change]) -> None:
        form = self._form
        parameters = form.parameters([row.message for row in rows])
        self._session.run(_BEGIN, *[(b"", form.single, values, form.formats) for values in parameters], _COMMIT)

    def _set(self, statement: Statement, rows: Sequence[_Change]) -> _Sent:
        values, formats = self._form.set_of([row.message for row in rows])
        count = len(statement.parameter_types)
        return b"", statement, values[:count], formats[:count]

    def _unnest(self, rows: Sequence[_Change]) -> None:
        join: list[_Sent] = [] if self._kind == "INSERT" else [(_BY_INDEX, None, (), None)]
        self._session.run(_BEGIN, *join, self._set(self._together, rows), _COMMIT)

    def _free(self, rows: Sequence[_Change]) -> None:
        self._session.run(_BEGIN, self._set(self._together, rows), _COMMIT)

    def _copy(self, rows: Sequence[_Change]) -> None:
        session = self._session
        if self._kind == "INSERT":
            session.copy("t", rows)
            return
        session.run(_BEGIN)
        some = [row[:1] for row in rows] if self._kind == "DELETE" else rows
        session.copy("stage", some, columns="id" if self._kind == "DELETE" else "id, a, b, c")
        session.run((_FROM_STAGE[self._kind], None, (), None), _COMMIT)

    def _merged(self, rows: Sequence[_Change]) -> None:
        self._session.run(_BEGIN, self._set(self._merge, rows), _COMMIT)


async def _mapping(dsn: str) -> RelationMapping:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        table = await read_table(CatalogReader(LibpqSession(connection)), TableName("public", "t"), as_owner=False)
    columns = tuple(Column(name, oid, -1, key=name == "id") for name, oid in _COLUMNS.items())
    return map_relation(Relation(1, "public", "t", "d", columns), table)


def _figure(session: _Session, kind: str, make: Callable[[Sequence[_Change]], None], size: int, rows: int, first: int) -> float:
    """Microseconds for a change."""
    count = max(min(rows // size, _SETS), 3) * size
    chosen = range(first, first + count) if kind == "INSERT" else random.sample(range(1, _TABLE + 1), min(count, _TABLE))
    values = [_change(kind, number, first) for number in chosen]
    # statements are prepared and caches are filled
    sets = [values[start : start + size] for start in range(0, len(values), size)]
    make(sets[0])
    before = session.cpu()
    for each in sets[1:]:
        make(each)
    found = (session.cpu() - before) / (len(sets) - 1) / size
    if kind == "INSERT":
        session.connection.execute("DELETE FROM t WHERE id > %s", (_TABLE,))
    elif kind == "DELETE":
        session.connection.execute(_FILL + " ON CONFLICT DO NOTHING")
    session.connection.execute("VACUUM t")
    return found * 1e6


_FILL: Final = f"INSERT INTO t SELECT g, g % 1000, g / 7, md5(g::text) FROM generate_series(1, {_TABLE}) AS g"


def main() -> None:
    """Run it. The arguments: the number of changes for each figure."""
    rows = (int(sys.argv[1]) if len(sys.argv) > 1 else 0) or _ROWS
    random.seed(1)
    with EmbeddedServer.create(18, settings=SETTINGS) as server:
        session = _Session(server.dsn())
        session.connection.execute(f"{NARROW} {_FILL}".encode())
        session.connection.execute("VACUUM ANALYZE t")
        session.connection.execute(_STAGE)
        session.connection.execute("SET synchronous_commit = off")
        mapping = asyncio.run(_mapping(server.dsn()))
        first = _TABLE + 1
        for kind in _MERGE:
            ways = _Ways(session, mapping, kind).all
            print(f"\n| {kind}s at once | {' | '.join(ways)} |\n| ---: |{' ---: |' * len(ways)}", flush=True)
            for size in _SIZES:
                found = [_figure(session, kind, make, size, rows, first) for make in ways.values()]
                first += 1
                print(f"| {size} | {' | '.join(f'{each:.1f}' for each in found)} |", flush=True)
        session.connection.close()


if __name__ == "__main__":
    main()
