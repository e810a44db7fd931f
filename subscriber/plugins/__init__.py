"""Output plugins: PostgreSQL's callbacks in Python, fed from pgoutput on our side of the wire."""

from subscriber.plugins.context import LogicalDecodingContext, OutputPluginOptions, OutputType, Record, ReorderBufferTXN
from subscriber.plugins.debezium import Debezium
from subscriber.plugins.jsonl import JsonLinesPlugin

__all__ = ["Debezium", "JsonLinesPlugin", "LogicalDecodingContext", "OutputPluginOptions", "OutputType", "Record", "ReorderBufferTXN"]
