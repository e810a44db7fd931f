"""A lake as the target: a landing zone, and Delta tables that Spark keeps. Landing needs pyarrow and nothing else."""

from subscriber.sinks.spark.sink import SparkSink

__all__ = ["SparkSink"]
