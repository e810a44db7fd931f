"""A standalone subscriber for PostgreSQL logical replication. ``docs/howto/library.md`` shows how to use it.

A name is imported when it is first used, so that a program pays only for what it uses.
"""

import importlib as _importlib
import typing as _typing

from subscriber._implementation import install as _install

if _typing.TYPE_CHECKING:
    from subscriber.catalog.verifications import TableVerification
    from subscriber.config import Settings, SubscriptionOptions
    from subscriber.consumer.received import ReceivedMessage, ReceivedTransaction
    from subscriber.consumer.transactions import TransactionStream, transactions
    from subscriber.errors import (
        ApplyError,
        ConfigurationError,
        CopyOutdated,
        DataLossError,
        NeverPrepared,
        ProtocolError,
        PublisherError,
        PublisherUnavailable,
        RelationError,
        SlotInUse,
        SpoolError,
        SubscriberError,
        SubscriptionChanged,
        SubscriptionInUse,
        TargetError,
        TargetUnavailable,
        UndecidedTransaction,
    )
    from subscriber.interfaces import ApplyStatistics, Finding, Sink, TableEntry, TableName, TableState
    from subscriber.interfaces.schema import SchemaStep, Section, StepState
    from subscriber.interfaces.sequences import SequenceResult, SequenceState
    from subscriber.interfaces.table_schema import SchemaDifference
    from subscriber.protocol.lsn import Lsn
    from subscriber.subscription.comparison.verify import verify
    from subscriber.subscription.cutover.cutover import (
        abort_cutover,
        complete_cutover,
        cutover,
        open_target,
        plan_cutover,
        rehearse_cutover,
        roll_back,
    )
    from subscriber.subscription.cutover.options import CutoverOptions
    from subscriber.subscription.launcher import Launcher
    from subscriber.subscription.management.alter import SubscriptionAlteration, alter_subscription
    from subscriber.subscription.management.create import create_subscription
    from subscriber.subscription.management.drop import drop_subscription
    from subscriber.subscription.management.repair import repair
    from subscriber.subscription.management.schema import SchemaOptions, copy_schema, diff_schema
    from subscriber.subscription.management.sequences import sync_sequences
    from subscriber.subscription.management.status import SubscriptionStatus, reset_subscription_stats, subscription_status
    from subscriber.subscription.migration import Migration
    from subscriber.subscription.run_status import Status, Until
    from subscriber.subscription.setup.checks import check
    from subscriber.subscription.subscription import Subscription
    from subscriber.transaction.changes import (
        UNCHANGED,
        Change,
        DeleteChange,
        InsertChange,
        MessageChange,
        TruncateChange,
        UpdateChange,
    )
    from subscriber.verification.model import RowDifference, RowKind, TableReport, VerificationLimits, VerificationReport

__version__ = "0.1.0"

__all__ = [
    "UNCHANGED",
    "ApplyError",
    "ApplyStatistics",
    "Change",
    "ConfigurationError",
    "CopyOutdated",
    "CutoverOptions",
    "DataLossError",
    "DeleteChange",
    "Finding",
    "InsertChange",
    "Launcher",
    "Lsn",
    "MessageChange",
    "Migration",
    "NeverPrepared",
    "ProtocolError",
    "PublisherError",
    "PublisherUnavailable",
    "ReceivedMessage",
    "ReceivedTransaction",
    "RelationError",
    "RowDifference",
    "RowKind",
    "SchemaDifference",
    "SchemaOptions",
    "SchemaStep",
    "Section",
    "SequenceResult",
    "SequenceState",
    "Settings",
    "Sink",
    "SlotInUse",
    "SpoolError",
    "Status",
    "StepState",
    "SubscriberError",
    "Subscription",
    "SubscriptionAlteration",
    "SubscriptionChanged",
    "SubscriptionInUse",
    "SubscriptionOptions",
    "SubscriptionStatus",
    "TableEntry",
    "TableName",
    "TableReport",
    "TableState",
    "TableVerification",
    "TargetError",
    "TargetUnavailable",
    "TransactionStream",
    "TruncateChange",
    "UndecidedTransaction",
    "Until",
    "UpdateChange",
    "VerificationLimits",
    "VerificationReport",
    "__version__",
    "abort_cutover",
    "alter_subscription",
    "check",
    "complete_cutover",
    "copy_schema",
    "create_subscription",
    "cutover",
    "diff_schema",
    "drop_subscription",
    "open_target",
    "plan_cutover",
    "rehearse_cutover",
    "repair",
    "reset_subscription_stats",
    "roll_back",
    "subscription_status",
    "sync_sequences",
    "transactions",
    "verify",
]

_MODULES = {
    "subscriber.interfaces": ("ApplyStatistics", "Finding", "Sink", "TableEntry", "TableName", "TableState"),
    "subscriber.interfaces.schema": ("SchemaStep", "Section", "StepState"),
    "subscriber.interfaces.sequences": ("SequenceResult", "SequenceState"),
    "subscriber.interfaces.table_schema": ("SchemaDifference",),
    "subscriber.catalog.verifications": ("TableVerification",),
    "subscriber.config": ("Settings", "SubscriptionOptions"),
    "subscriber.consumer.received": ("ReceivedMessage", "ReceivedTransaction"),
    "subscriber.consumer.transactions": ("TransactionStream", "transactions"),
    "subscriber.errors": (
        "ApplyError",
        "ConfigurationError",
        "CopyOutdated",
        "DataLossError",
        "NeverPrepared",
        "ProtocolError",
        "PublisherError",
        "PublisherUnavailable",
        "RelationError",
        "SlotInUse",
        "SpoolError",
        "SubscriberError",
        "SubscriptionChanged",
        "SubscriptionInUse",
        "TargetError",
        "TargetUnavailable",
        "UndecidedTransaction",
    ),
    "subscriber.protocol.lsn": ("Lsn",),
    "subscriber.subscription.cutover.cutover": (
        "abort_cutover",
        "complete_cutover",
        "cutover",
        "open_target",
        "plan_cutover",
        "rehearse_cutover",
        "roll_back",
    ),
    "subscriber.subscription.cutover.options": ("CutoverOptions",),
    "subscriber.subscription.launcher": ("Launcher",),
    "subscriber.subscription.management.alter": ("SubscriptionAlteration", "alter_subscription"),
    "subscriber.subscription.management.create": ("create_subscription",),
    "subscriber.subscription.management.drop": ("drop_subscription",),
    "subscriber.subscription.management.status": ("SubscriptionStatus", "reset_subscription_stats", "subscription_status"),
    "subscriber.subscription.management.repair": ("repair",),
    "subscriber.subscription.management.schema": ("SchemaOptions", "copy_schema", "diff_schema"),
    "subscriber.subscription.management.sequences": ("sync_sequences",),
    "subscriber.subscription.comparison.verify": ("verify",),
    "subscriber.subscription.migration": ("Migration",),
    "subscriber.subscription.run_status": ("Status", "Until"),
    "subscriber.subscription.setup.checks": ("check",),
    "subscriber.subscription.subscription": ("Subscription",),
    "subscriber.transaction.changes": (
        "UNCHANGED",
        "Change",
        "DeleteChange",
        "InsertChange",
        "MessageChange",
        "TruncateChange",
        "UpdateChange",
    ),
    "subscriber.verification.model": ("RowDifference", "RowKind", "TableReport", "VerificationLimits", "VerificationReport"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = {module.split(".")[1] for module in _MODULES}


_install()


# type checkers know the names of __all__ only
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:
            # the import makes it an attribute: `subscriber.errors` works after `import subscriber`
            return _importlib.import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
