"""What the processes of cases import, so that it is imported once."""

# ruff: noqa: F401 -- for those that are forked

from __future__ import annotations

import contextlib

from subscriber.subscription.run import run
from subscriber.subscription.setup import setup

with contextlib.suppress(ImportError):
    from subscriber.sinks.postgres import sink as postgres_sink
with contextlib.suppress(ImportError):
    from subscriber.sinks.sqlalchemy import sink as sqlalchemy_sink
with contextlib.suppress(ImportError):
    from subscriber.sinks.spark import sink as spark_sink
    from subscriber.sinks.spark.pipeline.program import start
