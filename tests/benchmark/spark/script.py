"""What a Spark user writes today: Structured Streaming over the files of changes, and in ``foreachBatch`` the last change of each key,
merged into a Delta table; without the Delta jar, the whole table rewritten.

It is given what the applier is given, and does less: one table, no TOASTed values, no TRUNCATE, no change log, no snapshot.
"""

from __future__ import annotations

import shutil
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
    """One table, kept by a stream.

    Args:
        spark: the session.
        directory: for all its files.
        delta: by MERGE INTO; else every batch rewrites the table.

    Attributes:
        done: of each micro-batch, when its rows could be read (``time.monotonic``).
    """

    def __init__(self, spark: Any, directory: Path, *, delta: bool) -> None:
        self._spark = spark
        self._directory = directory
        self.changes = directory / "changes"
        self.changes.mkdir(parents=True)
        self._delta = delta
        self._versions = 0
        self.done: dict[int, float] = {}
        self._schema: Any = None

    @property
    def _table(self) -> str:
        return str(self._directory / "table") if self._delta else str(self._directory / f"table-{self._versions}")

    def load(self, base: Path) -> None:
        """Make the table of a file of rows."""
        rows = self._spark.read.parquet(str(base))
        self._schema = rows.schema
        rows.select(*_COLUMNS).write.format("delta" if self._delta else "parquet").save(self._table)

    def stream(self, *, until_empty: bool) -> Any:
        """Start the query: for the existing files, or without an end."""
        source = self._spark.readStream.schema(self._schema).parquet(str(self.changes))
        writer = source.writeStream.foreachBatch(self._merge).option("checkpointLocation", str(self._directory / "checkpoint"))
        return (writer.trigger(availableNow=True) if until_empty else writer).start()

    def _merge(self, rows: Any, number: int) -> None:
        rows.createOrReplaceTempView("changed")
        latest = rows.sparkSession.sql(
            "SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY id ORDER BY _lsn DESC, _seq DESC) AS place FROM changed)"
            " WHERE place = 1"
        )
        latest.createOrReplaceTempView("latest")
        if self._delta:
            latest.sparkSession.sql(_MERGE.format(table=self._table))
        else:
            self._rewrite(latest)
        self.done[number] = time.monotonic()

    def _rewrite(self, latest: Any) -> None:
        before = latest.sparkSession.read.parquet(self._table)
        kept = before.join(latest, "id", "left_anti").select(*_COLUMNS)
        now = kept.unionByName(latest.where("_op <> 'd'").select(*_COLUMNS))
        old, self._versions = self._table, self._versions + 1
        now.write.parquet(self._table)
        shutil.rmtree(old)

    def rows(self) -> Any:
        """The table now."""
        return self._spark.read.format("delta" if self._delta else "parquet").load(self._table)
