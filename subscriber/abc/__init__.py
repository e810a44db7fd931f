"""The interfaces between the packages: small Protocols whose docstrings are the contract, and their values (``values.py``).

``walreceiver`` provides ``ReplicationStream``, which ``apply`` reads. ``sinks`` implement ``Sink`` (``sink.py``), ``TableSink``
(``tables.py``) and the abilities that they have (``abilities.py``). ``Spool`` stores large transactions.
``docs/explanation/architecture.md`` shows how they fit together.
"""

from subscriber.abc.abilities import (
    DescribedSink,
    ExportingSink,
    ExportSnapshot,
    FinishingSink,
    GroupingSink,
    KeyedRowSource,
    ParallelSink,
    ParallelTransaction,
    PingedSink,
    PostgresDatabase,
    Query,
    RepairingSink,
    Row,
    RowSource,
    TwoPhaseSink,
    WatchedSink,
)
from subscriber.abc.publisher import ReplicationStream, Spool
from subscriber.abc.sink import OpenedSink, Sink, StateStore, Stream
from subscriber.abc.tables import SnapshotTableSink, TableGroup, TableSink
from subscriber.abc.values import (
    CATALOG_SCHEMA,
    ApplyStatistics,
    Batch,
    CopyFormat,
    Finding,
    Position,
    PublishedTable,
    RelationGate,
    SnapshotOrder,
    SubscriptionState,
    TableEntry,
    TableName,
    TableState,
    TargetActivity,
    TwoPhaseState,
    WorkerActivity,
)
from subscriber.abc.worker_details import Retry, WorkerDetails, WorkerState

__all__ = [
    "CATALOG_SCHEMA",
    "ApplyStatistics",
    "Batch",
    "CopyFormat",
    "DescribedSink",
    "ExportSnapshot",
    "ExportingSink",
    "Finding",
    "FinishingSink",
    "GroupingSink",
    "KeyedRowSource",
    "OpenedSink",
    "ParallelSink",
    "ParallelTransaction",
    "PingedSink",
    "Position",
    "PostgresDatabase",
    "PublishedTable",
    "Query",
    "RelationGate",
    "RepairingSink",
    "ReplicationStream",
    "Retry",
    "Row",
    "RowSource",
    "Sink",
    "SnapshotOrder",
    "SnapshotTableSink",
    "Spool",
    "StateStore",
    "Stream",
    "SubscriptionState",
    "TableEntry",
    "TableGroup",
    "TableName",
    "TableSink",
    "TableState",
    "TargetActivity",
    "TwoPhaseSink",
    "TwoPhaseState",
    "WatchedSink",
    "WorkerActivity",
    "WorkerDetails",
    "WorkerState",
]
