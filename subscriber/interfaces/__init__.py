"""The interfaces between the packages: small Protocols whose docstrings are the contract, and their values (``values.py``).

``walreceiver`` provides ``ReplicationStream``, which ``apply`` reads. ``sinks`` implement ``Sink`` (``sink.py``), ``TableSink``
(``tables.py``) and the abilities that they have (``abilities.py``). ``Spool`` stores large transactions.
``docs/explanation/architecture.md`` shows how they fit together.
"""

from subscriber.interfaces.abilities import (
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
from subscriber.interfaces.conditions import Condition
from subscriber.interfaces.publisher import ReplicationStream, Spool
from subscriber.interfaces.sink import OpenedSink, Sink, StateStore, Stream
from subscriber.interfaces.tables import KeptRows, ResumableTableSink, SnapshotTableSink, TableGroup, TableSink
from subscriber.interfaces.values import (
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
from subscriber.interfaces.worker_details import Retry, WorkerDetails, WorkerState

__all__ = [
    "CATALOG_SCHEMA",
    "ApplyStatistics",
    "Batch",
    "Condition",
    "CopyFormat",
    "DescribedSink",
    "ExportSnapshot",
    "ExportingSink",
    "Finding",
    "FinishingSink",
    "GroupingSink",
    "KeptRows",
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
    "ResumableTableSink",
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
