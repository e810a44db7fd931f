"""The seams between the rooms: small Protocols whose texts are the contract (``seams.py``), and what passes through (``values.py``).

``ReplicationStream`` is what ``walreceiver`` gives and ``apply`` reads; ``Sink`` and ``TableSink`` are what ``apply`` drives and
``sinks`` build; ``Spool`` is where large transactions wait. ``docs/architecture.md`` draws how they meet.
"""

from subscriber.abc.details import Retry, WorkerDetails, WorkerState
from subscriber.abc.seams import (
    ManyTablesSink,
    ParallelTransaction,
    PostgresDatabase,
    Query,
    ReplicationStream,
    Sink,
    SnapshotTableSink,
    Spool,
    TableSink,
    WatchedSink,
)
from subscriber.abc.values import (
    CATALOG_SCHEMA,
    ApplyStatistics,
    Batch,
    Capabilities,
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

__all__ = [
    "CATALOG_SCHEMA",
    "ApplyStatistics",
    "Batch",
    "Capabilities",
    "CopyFormat",
    "Finding",
    "ManyTablesSink",
    "ParallelTransaction",
    "Position",
    "PostgresDatabase",
    "PublishedTable",
    "Query",
    "RelationGate",
    "ReplicationStream",
    "Retry",
    "Sink",
    "SnapshotOrder",
    "SnapshotTableSink",
    "Spool",
    "SubscriptionState",
    "TableEntry",
    "TableName",
    "TableSink",
    "TableState",
    "TargetActivity",
    "TwoPhaseState",
    "WatchedSink",
    "WorkerActivity",
    "WorkerDetails",
    "WorkerState",
]
