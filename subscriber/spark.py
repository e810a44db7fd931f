"""For users of Spark: read a lake that a subscription keeps (``pip install 'pg-subscriber[spark]'``).

Example::

    from subscriber.spark import snapshot_of, read, register

    snapshot = snapshot_of("spark:///var/lib/lake")
    orders = read(spark, "spark:///var/lib/lake", "public.orders", snapshot=snapshot)
    items = read(spark, "spark:///var/lib/lake", "public.items", snapshot=snapshot)      # as of the same transaction

    register(spark)
    changes = spark.readStream.format("postgres_changes").option("table", "public.orders").load("/var/lib/lake")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.reading.dataframes import read_table as read
from subscriber.sinks.spark.reading.dataframes import snapshot_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Snapshot", "read", "register", "snapshot_of"]


def register(spark: SparkSession) -> None:
    """Register the format ``postgres_changes`` with a session. See :mod:`subscriber.sinks.spark.reading.data_source` for its options."""
    from subscriber.sinks.spark.reading.data_source import PostgresChanges  # noqa: PLC0415 -- needs pyspark, an extra

    spark.dataSource.register(PostgresChanges)
