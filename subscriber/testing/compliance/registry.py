"""The scenarios by name, and what a sink has to be able to for each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from subscriber.abc import Capabilities
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.target import ComplianceTarget

__all__ = ["Scenario", "Scenarios"]

Function = Callable[[Feed], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing that every sink does, or every one that declares to.

    Attributes:
        name: of the function, behind its module's.
        needs: names of the capabilities without which there is nothing to see.
        function: the scenario itself; it gets a feed that is opened on an empty target.
    """

    name: str
    needs: frozenset[str]
    function: Function

    def __str__(self) -> str:
        return self.name

    def lacking(self, capabilities: Capabilities) -> Sequence[str]:
        """Which of the needs a sink does not declare: where there are any, the scenario is not for it."""
        return sorted(need for need in self.needs if not getattr(capabilities, need))

    async def run(self, target: ComplianceTarget) -> None:
        """Run it on an empty target.

        Raises:
            AssertionError: the sink does something else than its contract says.
            SubscriberError: it refuses what it has to do.
        """
        feed = Feed(target)
        try:
            await feed.open()
            await self.function(feed)
            await feed.close()
        except BaseException:
            await feed.sink.close()
            raise
        feed.assert_acknowledgements()


class Scenarios:
    """Those of one topic."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._found: list[Scenario] = []

    @property
    def found(self) -> tuple[Scenario, ...]:
        """In the order of the module."""
        return tuple(self._found)

    def needing(self, *needs: str) -> Callable[[Function], Function]:
        """Add the function, for sinks with these capabilities."""

        def add(function: Function) -> Function:
            self._found.append(Scenario(f"{self._topic}.{getattr(function, '__name__', '')}", frozenset(needs), function))
            return function

        return add

    def __call__(self, function: Function) -> Function:
        """Add the function, for all sinks."""
        return self.needing()(function)
