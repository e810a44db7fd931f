"""A base for sinks of one's own: the target stores changes of rows and a text in one atomic step. See ``docs/howto/own-sink.md``."""

from subscriber.sinks.atomic.compared import ComparedAtomicTarget
from subscriber.sinks.atomic.row_changes import ClearTable, DeleteRow, InsertRow, Row, RowChange, UpdateRow
from subscriber.sinks.atomic.sink import AtomicSink

__all__ = ["AtomicSink", "ClearTable", "ComparedAtomicTarget", "DeleteRow", "InsertRow", "Row", "RowChange", "UpdateRow"]
