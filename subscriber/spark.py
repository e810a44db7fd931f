"""For Spark people: read a lake that a subscription keeps (``pip install 'pg-subscriber[spark]'``).

Example::

    from subscriber.spark import cut_of, read

    cut = cut_of("spark:///var/lib/lake")
    orders = read(spark, "spark:///var/lib/lake", "public.orders", cut=cut)
    items = read(spark, "spark:///var/lib/lake", "public.items", cut=cut)      # as of the same transaction
"""

from subscriber.sinks.spark.applied import Cut
from subscriber.sinks.spark.reading import cut_of
from subscriber.sinks.spark.reading import read_table as read

__all__ = ["Cut", "cut_of", "read"]
