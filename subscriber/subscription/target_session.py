"""The target of a subscription, and what was opened there last."""

from __future__ import annotations

from collections.abc import Callable

from subscriber.errors import TargetUnavailable
from subscriber.interfaces import AbortableSink, ApplyStatistics, GroupingSink, OpenedSink, TableGroup
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.spec import RunSpec

__all__ = ["TargetSession"]


class TargetSession:
    """Opens the sink of a subscription, again after errors.

    Args:
        spec: the subscription.

    Attributes:
        spec: as given.
        is_open: whether :attr:`opened` is still open.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._opened: OpenedSink | None = None
        self.is_open = False

    @property
    def statistics(self) -> ApplyStatistics:
        """Counters since the sink was created."""
        return self.spec.sink.statistics

    @property
    def opened(self) -> OpenedSink:
        """What was opened last."""
        assert self._opened is not None
        return self._opened

    async def open(self, on_durable: Callable[[Lsn], None]) -> OpenedSink:
        """Open the sink, and close first what is still open.

        Raises:
            SubscriberError: see :meth:`subscriber.interfaces.Sink.open`.
        """
        await self.close()
        self._opened = opened = await self.spec.sink.open(self.spec.name, on_durable)
        self.is_open = True
        return opened

    def open_group(self) -> TableGroup:
        """Open a group of tables. See :meth:`subscriber.interfaces.GroupingSink.open_group`.

        Raises:
            TargetUnavailable: the sink is closed now.
        """
        opened = self.opened
        if not self.is_open or not isinstance(opened, GroupingSink):
            raise TargetUnavailable("the sink is closed", hint="it is opened again soon")
        return opened.open_group()

    def abort(self) -> None:
        """Cut the sessions with a target that does not answer, if it has sessions."""
        if isinstance(self.spec.sink, AbortableSink):
            self.spec.sink.abort()

    async def close(self) -> None:
        """Close what is open. Idempotent."""
        self.is_open = False
        if self._opened is not None:
            await self._opened.close()
