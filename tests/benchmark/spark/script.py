"""What a Spark user writes today: Structured Streaming over the files of changes, and in ``foreachBatch`` the last change of each key,
merged into a Delta table.

It is given what the applier is given, and does less: no TOASTed values, no TRUNCATE, no change log, no snapshot. With several tables, each
gets the same changes, one MERGE after another.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

__all__ = ["Script"]

_MERGE: Final = """
MERGE INTO delta.`{table}` AS t USING latest AS s ON t.id = s.id
WHEN MATCHED AND s._op = 'd' THEN DELETE
WHEN MATCHED THEN UPDATE SET id = s.id, name = s.name, amount = s.amount, at = s.at, doc = s.doc, flag = s.flag
WHEN NOT MATCHED AND s._op <> 'd' THEN INSERT (id, name, amount, at, doc, flag) VALUES (s.id, s.name, s.amount, s.at, s.doc, s.flag)
"""
_COLUMNS: Final = ("id", "name", "amount", "at", "doc", "flag")


class Script:
    """Tables that are kept by a stream.

    Args:
        spark: the session, with Delta.
        directory: for all its files.
        tables: their number.

    Attributes:
        changes: where the files of changes go.
        done: of each micro-batch, when its rows could be read, in seconds since 1970.
    """

    def __init__(self, spark: Any, directory: Path, *, tables: int) -> None:
        self._spark = spark
        self.directory = directory
        self.changes = directory / "changes"
        self.changes.mkdir(parents=True)
        self._tables = [str(directory / f"table-{number}") for number in range(tables)]
        self.done: dict[int, float] = {}
        self._schema: Any = None

    def load(self, base: Path) -> None:
        """Make the first table of files of rows. The others begin empty."""
        rows = self._spark.read.parquet(str(base))
        self._schema = rows.schema
        rows.select(*_COLUMNS).write.format("delta").save(self._tables[0])
        for table in self._tables[1:]:
            rows.limit(0).select(*_COLUMNS).write.format("delta").save(table)

    def stream(self, *, until_empty: bool, interval: float = 0.0) -> Any:
        """Start the query: for the existing files, or without an end, with a micro-batch in each interval (0: as soon as possible)."""
        source = self._spark.readStream.schema(self._schema).parquet(str(self.changes))
        writer = source.writeStream.foreachBatch(self._merge).option("checkpointLocation", str(self.directory / "checkpoint"))
        once = {"availableNow": True} if until_empty else {"processingTime": f"{round(interval * 1000)} milliseconds"}
        return writer.trigger(**once).start()

    def _merge(self, rows: Any, number: int) -> None:
        session = rows.sparkSession
        rows.createOrReplaceTempView("changed")
        latest = session.sql(
            "SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY id ORDER BY _lsn DESC, _seq DESC) AS place FROM changed)"
            " WHERE place = 1"
        )
        latest.createOrReplaceTempView("latest")
        for table in self._tables:
            session.sql(_MERGE.format(table=table))
        self.done[number] = time.time()

    def rows(self) -> Any:
        """The first table now."""
        return self._spark.read.format("delta").load(self._tables[0])
