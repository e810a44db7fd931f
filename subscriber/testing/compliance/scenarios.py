"""The scenarios by name, and the abilities that each needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final
from unittest import SkipTest

from subscriber.interfaces import ApplyWorkersSink, ParallelSink, ParkingSink, TwoPhaseSink
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.target import ComplianceTarget, SettableTarget

__all__ = ["Scenario", "Scenarios"]

Function = Callable[[Feed], Awaitable[None]]

_ABILITIES: Final = {"two_phase": TwoPhaseSink, "parallel_apply": ParallelSink, "parking": ParkingSink}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A test that every sink must pass, or every one that has certain abilities.

    Attributes:
        name: module and function.
        needs: ``two_phase``, ``parallel_apply``, ``parking``, ``apply_workers``: the sink must have this ability. ``settings``: the target
            must be a :class:`SettableTarget`. Others are names of :class:`subscriber.testing.compliance.Traits`.
        function: the scenario. It gets a feed that is opened on an empty target.
    """

    name: str
    needs: frozenset[str]
    function: Function

    def __str__(self) -> str:
        return self.name

    def lacking(self, feed: Feed) -> Sequence[str]:
        """The needs that a sink or its target does not have. If there are any, the scenario does not apply to it."""
        return sorted(need for need in self.needs if not _has(feed, need))

    async def run(self, target: ComplianceTarget) -> None:
        """Run it on an empty target.

        Raises:
            AssertionError: the sink violates its contract.
            SubscriberError: it rejects something that it must accept.
            SkipTest: it does not have the abilities that the scenario needs. pytest skips the test then.
        """
        feed = Feed(target)
        try:
            await feed.open()
            if lacking := self.lacking(feed):
                raise SkipTest(f"it has no {', '.join(lacking)}")
            await self.function(feed)
            await feed.close()
        except BaseException:
            await feed.close()
            raise
        feed.assert_acknowledgements()


def _has(feed: Feed, need: str) -> bool:
    if need == "settings":
        return isinstance(feed.target, SettableTarget)
    if need == "apply_workers":
        return isinstance(feed.sink, ApplyWorkersSink) and feed.sink.has_apply_workers
    if need in _ABILITIES:
        return isinstance(feed.opened, _ABILITIES[need])
    return bool(getattr(feed.target.traits, need))


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
        """Add the function, for sinks with these abilities."""

        def add(function: Function) -> Function:
            self._found.append(Scenario(f"{self._topic}.{getattr(function, '__name__', '')}", frozenset(needs), function))
            return function

        return add

    def __call__(self, function: Function) -> Function:
        """Add the function, for all sinks."""
        return self.needing()(function)
