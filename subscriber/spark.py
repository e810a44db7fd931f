"""For users of Spark: read a lake that a subscription keeps (``pip install 'pg-subscriber[spark]'``).

Example::

    from subscriber.spark import register, snapshot

    lake = snapshot(spark, "/var/lib/lake")
    orders = lake.table("public.orders")
    items = lake.table("public.items")  # as of the same transaction

    register(spark)
    changes = spark.readStream.format("postgres_changes").option("table", "public.orders").load("/var/lib/lake")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subscriber.sinks.spark.reading.snapshot import LakeSnapshot, snapshot
from subscriber.sinks.spark.session.spark_session import warn_of_another_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["LakeSnapshot", "register", "snapshot"]


def register(spark: SparkSession) -> None:
    """Register the formats ``postgres_changes`` and ``postgres_snapshot`` with a session.

    See :mod:`subscriber.sinks.spark.reading.data_sources` for their options.
    """
    from subscriber.sinks.spark.reading.data_sources import PostgresChanges, PostgresSnapshot  # noqa: PLC0415 -- pyspark is an extra

    warn_of_another_python(spark)
    spark.dataSource.register(PostgresChanges)
    spark.dataSource.register(PostgresSnapshot)
