"""Runs the subscriptions of a configuration file in one process, and follows its changes.

An error of one subscription does not end the others: each is retried as the launcher does. A subscription whose configuration has changed
is stopped cleanly and started again; new limits take effect while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from subscriber.apply.progress import CopyProgress
from subscriber.apply.retry import Backoff, policy
from subscriber.apply.tasks import task_group
from subscriber.config import Settings, SubscriptionOptions
from subscriber.config.file.configuration import Configuration, ConfiguredSubscription, ConfiguredTarget
from subscriber.errors import SubscriberError, SubscriptionChanged
from subscriber.log_fields import error_fields
from subscriber.repeated_errors import RepeatedErrors
from subscriber.subscription.configured import options_of, settings_of, subscription_of, url_of
from subscriber.subscription.kept import keep_running, note_error, wait
from subscriber.subscription.launcher import Launcher
from subscriber.subscription.subscription import Subscription

__all__ = ["Service"]

_TICK: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """One subscription of the file, or the launcher of one target.

    Attributes:
        essence: what starts it again when it changes.
        options: those of the subscription.
    """

    essence: Hashable
    settings: Settings
    subscription: ConfiguredSubscription | None = None
    launched: ConfiguredTarget | None = None
    options: SubscriptionOptions | None = None


class _Worker:
    """A unit that runs."""

    def __init__(self, unit: _Unit, subject: Subscription | Launcher) -> None:
        self.unit = unit
        self.subject = subject
        self.stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        self.stopping.set()
        self.subject.stop()


class Service:
    """Runs what a configuration file says. It is made in the event loop that runs it.

    Args:
        options: parameters of the command line, which come before those of the file.
        settings: settings of the command line.
        progress: is told about table copies.

    Attributes:
        paused: names of subscriptions that do not run. Any thread may change it; it is followed within a second.
    """

    def __init__(self, options: Mapping[str, str], settings: Mapping[str, str], progress: CopyProgress | None = None) -> None:
        self._options = options
        self._settings = settings
        self._progress = progress
        self._wanted: dict[str, _Unit] = {}
        self._workers: dict[str, _Worker] = {}
        self._ended: dict[str, _Unit] = {}
        self._error: SubscriberError | None = None
        self._stop = False
        self._noted = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._held = Counter[str]()
        self.paused: set[str] = set()

    @property
    def subscriptions(self) -> dict[str, Subscription]:
        """The running subscriptions, by name."""
        found: dict[str, Subscription] = {}
        for worker in list(self._workers.values()):
            if isinstance(worker.subject, Launcher):
                found |= worker.subject.subscriptions
            else:
                found[worker.subject.name] = worker.subject
        return found

    @property
    def launched(self) -> list[str]:
        """The URLs of the targets whose catalogs define subscriptions."""
        return [url_of(unit.launched) for unit in list(self._wanted.values()) if unit.launched is not None]

    def target_of(self, name: str) -> str | None:
        """The URL of the target of a subscription that the file defines. None: it does not."""
        unit = self._wanted.get(f"subscriptions.{name}")
        return None if unit is None or unit.subscription is None else url_of(unit.subscription.target)

    def runs(self, name: str) -> bool:
        """Whether a subscription of the file runs, or has not stopped yet. Any thread may ask."""
        return f"subscriptions.{name}" in self._workers

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Stop a subscription of the file, and start it again at the end of the block. Any thread may do this, also before :meth:`run`."""
        self._loop.call_soon_threadsafe(self._hold, f"subscriptions.{name}", 1)
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the program has ended
                self._loop.call_soon_threadsafe(self._hold, f"subscriptions.{name}", -1)

    def _hold(self, key: str, more: int) -> None:
        # several may hold it at once
        self._held[key] += more
        self._ended.pop(key, None)
        self._noted.set()

    def configure(self, configuration: Configuration, names: frozenset[str] = frozenset()) -> None:
        """Run what this configuration says from now on. If it cannot run, nothing changes.

        Args:
            configuration: the file.
            names: only these subscriptions, and no launcher. Empty: all.

        Raises:
            ConfigurationError: a subscription cannot run as it is configured.
        """
        wanted = {}
        for name, each in configuration.subscriptions.items():
            if not names or name in names:
                wanted[f"subscriptions.{name}"] = self._unit(each)
        for name, target in configuration.targets.items():
            if target.launcher and not names:
                settings = settings_of({**configuration.settings, **self._settings})
                wanted[f"targets.{name}"] = _Unit(essence=(url_of(target), settings), settings=settings, launched=target)
        for unit in wanted.values():
            self._make(unit)
        self._wanted = wanted
        self._noted.set()

    def _unit(self, each: ConfiguredSubscription) -> _Unit:
        options, settings = options_of(each, self._options), settings_of({**each.settings, **self._settings})
        target = replace(each.target, applier={}, launcher=False)
        essence = (each.connection, each.password, each.publications, url_of(target), options.without_limits, settings)
        return _Unit(essence=essence, settings=settings, subscription=each, options=options)

    def _make(self, unit: _Unit) -> Subscription | Launcher:
        if unit.subscription is not None:
            return subscription_of(unit.subscription, self._options, self._settings, self._progress)
        assert unit.launched is not None
        launcher = Launcher(url_of(unit.launched), settings=unit.settings, progress=self._progress)
        launcher.paused = self.paused
        return launcher

    def stop(self) -> None:
        """End :meth:`run` soon and cleanly."""
        self._stop = True
        self._noted.set()

    async def run(self) -> None:
        """Run until :meth:`stop`, or until every subscription was disabled by an error.

        Raises:
            SubscriberError: the error that disabled the last of them.
        """
        async with task_group() as group:
            try:
                while not self._stop:
                    self._noted.clear()
                    self._compare(group)
                    if not self._workers and self._error is not None and not self.paused:
                        raise self._error
                    running = [worker.task for worker in self._workers.values() if worker.task is not None]
                    noted = asyncio.ensure_future(self._noted.wait())
                    try:
                        await asyncio.wait({noted, *running}, return_when=asyncio.FIRST_COMPLETED, timeout=_TICK)
                    finally:
                        noted.cancel()
            finally:
                for worker in self._workers.values():
                    worker.stop()

    def _waits(self, key: str) -> bool:
        kind, _, name = key.partition(".")
        return self._held[key] > 0 or (kind == "subscriptions" and name in self.paused)

    def _compare(self, group: asyncio.TaskGroup) -> None:
        for key, worker in list(self._workers.items()):
            unit = self._wanted.get(key)
            if worker.task is not None and worker.task.done():
                del self._workers[key]
                if not worker.stopping.is_set():
                    self._ended[key] = worker.unit
            elif unit is None or unit.essence != worker.unit.essence or self._waits(key):
                worker.stop()
            elif isinstance(worker.subject, Subscription) and unit.options is not None:
                worker.subject.set_limits(unit.options)
        for key, unit in self._wanted.items():
            ended = self._ended.get(key)
            if key in self._workers or self._waits(key) or (ended is not None and ended.essence == unit.essence):
                continue
            worker = self._workers[key] = _Worker(unit, self._make(unit))
            worker.task = group.create_task(self._keep(key, worker), name=key)

    async def _keep(self, key: str, worker: _Worker) -> None:
        if isinstance(worker.subject, Launcher):
            await self._keep_launcher(key, worker)
            return
        assert worker.unit.subscription is not None
        failed = partial(note_error, worker.subject, url_of(worker.unit.subscription.target))
        while True:
            error = await keep_running(worker.subject, worker.unit.settings, worker.stopping, failed)
            if not isinstance(error, SubscriptionChanged):
                break
        if error is not None:
            self._error = error
            _log.error(
                'subscription "%s" is disabled because of an error: %s; it stays so until its configuration changes or the program is'
                " started again",
                worker.subject.name,
                error.one_line(),
            )

    async def _keep_launcher(self, key: str, worker: _Worker) -> None:
        backoff, errors = Backoff(worker.unit.settings), RepeatedErrors(_log)
        while not worker.stopping.is_set():
            try:
                assert isinstance(worker.subject, Launcher)
                await worker.subject.run()
            except SubscriberError as error:
                reaction, text = policy(error), error.one_line()
                pause = backoff.pause(reaction)
                errors.tell(reaction.level, text, f"{key}: {text}; next attempt in {pause:.1f} s", error_fields(error))
                await wait(worker.stopping, pause)
                if not worker.stopping.is_set():
                    worker.subject = self._make(worker.unit)
