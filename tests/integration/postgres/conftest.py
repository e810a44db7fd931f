"""What the tests of sets observe."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from subscriber.interfaces import TableName
from subscriber.sinks.postgres.apply.applier import Applier
from subscriber.sinks.postgres.apply.error_reports import SetContext
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.session.statement import Statement


class Sent(list[Statement]):
    """The statements that were sent for sets.

    Attributes:
        omitted: number of UPDATEs that were not made.
    """

    omitted = 0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Observes the pipeline."""
    found = Sent()
    send = Pipeline.send

    def observed(pipeline: Pipeline, statement: Statement, context: object, *arguments: Any, **more: Any) -> None:
        if isinstance(context, SetContext):
            found.append(statement)
            found.omitted += context.omitted
        send(pipeline, statement, context, *arguments, **more)

    monkeypatch.setattr(Pipeline, "send", observed)
    return found


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The attempts to apply a batch: whether each used sets."""
    found: list[bool] = []
    attempt = Applier._attempt

    async def observed(applier: Applier, *arguments: Any, without_sets: Collection[TableName] | None = None, **more: Any) -> None:
        found.append(without_sets is not None)
        await attempt(applier, *arguments, without_sets=without_sets, **more)

    monkeypatch.setattr(Applier, "_attempt", observed)
    return found
