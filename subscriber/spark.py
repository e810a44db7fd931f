"""For users of Spark: read a lake that a subscription keeps (``pip install 'pg-subscriber[spark]'``).

Example::

    from subscriber.spark import cut_of, read, register

    cut = cut_of("spark:///var/lib/lake")
    orders = read(spark, "spark:///var/lib/lake", "public.orders", cut=cut)
    items = read(spark, "spark:///var/lib/lake", "public.items", cut=cut)      # as of the same transaction

    register(spark)
    changes = spark.readStream.format("postgres_changes").option("table", "public.orders").load("/var/lib/lake")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subscriber.sinks.spark.catalog.snapshots import Cut
from subscriber.sinks.spark.reading.dataframes import cut_of
from subscriber.sinks.spark.reading.dataframes import read_table as read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Cut", "cut_of", "read", "register"]


def register(spark: SparkSession) -> None:
    """Register the format ``postgres_changes`` with a session. See :mod:`subscriber.sinks.spark.reading.data_source` for its options."""
    from subscriber.sinks.spark.reading.data_source import PostgresChanges  # noqa: PLC0415 -- needs pyspark, an extra

    spark.dataSource.register(PostgresChanges)
