"""The scenarios by name, and the abilities that each needs."""

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
    """A test that every sink must pass, or every one that declares certain abilities.

    Attributes:
        name: module and function.
        needs: names of the capabilities that it tests.
        function: the scenario. It gets a feed that is opened on an empty target.
    """

    name: str
    needs: frozenset[str]
    function: Function

    def __str__(self) -> str:
        return self.name

    def lacking(self, capabilities: Capabilities) -> Sequence[str]:
        """The needs that a sink does not declare. If there are any, the scenario does not apply to it."""
        return sorted(need for need in self.needs if not getattr(capabilities, need))

    async def run(self, target: ComplianceTarget) -> None:
        """Run it on an empty target.

        Raises:
            AssertionError: the sink violates its contract.
            SubscriberError: it rejects something that it must accept.
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
    """The scenarios of one topic."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._found: list[Scenario] = []

    @property
    def found(self) -> tuple[Scenario, ...]:
        """The scenarios, in the order of the module."""
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
