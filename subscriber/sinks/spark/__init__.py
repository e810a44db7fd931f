"""A lake as the target: a landing zone, and Delta tables that the applier maintains. Landing needs only pyarrow."""

from subscriber.sinks.spark.sink import SparkSink

__all__ = ["SparkSink"]
