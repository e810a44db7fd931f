"""What a worker reports of itself beyond the columns of pg_stat_subscription, as one JSON text in the target's catalog."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from subscriber.abc.values import TableName

__all__ = ["WorkerDetails", "WorkerState"]


class WorkerState(StrEnum):
    """What the worker of a subscription does."""

    CONNECTING = "connecting"
    """There is no stream yet."""
    COPYING = "copying"
    """It streams, and tables are being copied."""
    CATCHING_UP = "catching_up"
    """It streams. A table, or the stream itself, has not reached yet where the publisher's WAL ended when the stream began."""
    RUNNING = "running"
    """It streams, all tables are synchronized, and it has caught up once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDetails:
    """See the module.

    Attributes:
        left_out: of the apply worker: published tables that the subscription does not replicate, each with the reason.
    """

    left_out: Mapping[TableName, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """ASCII only, so that every target can hold it."""
        return json.dumps({"left_out": [[table.namespace, table.name, reason] for table, reason in sorted(self.left_out.items())]})

    @classmethod
    def from_json(cls, text: object) -> Self:
        """The details that a catalog holds. What this program did not write counts as nothing."""
        try:
            values: Any = json.loads(text) if isinstance(text, str) else {}
            return cls(
                left_out={TableName(str(namespace), str(name)): str(reason) for namespace, name, reason in values.get("left_out", ())}
            )
        except (ValueError, TypeError, AttributeError, RecursionError):
            return cls()
