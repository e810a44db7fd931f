"""Continuous verification: compare the tables of a running subscription with the publisher's, one after another, in the background.

Each table is compared at an LSN of its own, as :func:`subscriber.verify` does it with ``changed=True``, so that no snapshot lasts longer
than one table. ``verify_max_rate`` limits the rows per second. The table whose last verification is the oldest is next. The results are
stored in the target's catalog; those of ``subscriber verify`` count too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from subscriber.catalog.verifications import since_synchronized
from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.interfaces import TableName
from subscriber.subscription.comparison.verify import last_verifications, verify
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.spec import RunSpec
from subscriber.verification.model import VerificationLimits

__all__ = ["ContinuousVerification"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 60.0
"""A table that could not be compared is tried again after this time, or after ``verify_interval`` if that is shorter."""


class ContinuousVerification:
    """Compares the tables of one run.

    Args:
        spec: the subscription.
        state: of the run. ``verifications`` is kept up to date.
    """

    def __init__(self, spec: RunSpec, state: RunState) -> None:
        self._spec = spec
        self._state = state
        self._interval = spec.settings.verify_interval
        self._limits = VerificationLimits(jobs=1, max_rate=spec.settings.verify_max_rate or None)
        self._failed: dict[TableName, float] = {}
        self._told: dict[TableName, str] = {}

    async def run(self) -> None:
        """Compare until cancelled.

        Raises:
            ConfigurationError: this target cannot be compared.
        """
        assert self._spec.target is not None
        read = False
        while True:
            if (table := self._next()) is None:
                read = False
                await asyncio.sleep(min(self._interval, _LOOK_SECONDS))
            elif not read:
                # another process may have compared it
                read = await self._read(self._spec.target)
            else:
                try:
                    await self._verify(table, self._spec.target)
                except SubscriberError as error:
                    self._leave_out(table, error.one_line())

    async def _read(self, target: str) -> bool:
        """Read the stored verifications. Return whether that succeeded."""
        try:
            self._state.verifications |= await last_verifications(self._spec.name, target=target)
        except ConfigurationError:
            raise
        except SubscriberError as error:
            _log.info("the stored verifications could not be read: %s", error.one_line())
            await asyncio.sleep(_LOOK_SECONDS)
            return False
        return True

    def _next(self) -> TableName | None:
        """The table that is to be compared now. None: no table."""
        now = time.time()
        due: list[tuple[float, TableName]] = []
        for table, entry in self._state.states.entries().items():
            if entry.is_synchronized and now - self._failed.get(table, 0.0) >= min(_RETRY_SECONDS, self._interval):
                found = since_synchronized(entry, self._state.verifications.get(table))
                verified_at = 0.0 if found is None else found.verified_at
                if now - verified_at >= self._interval:
                    due.append((verified_at, table))
        return min(due)[1] if due else None

    async def _verify(self, table: TableName, target: str) -> None:
        name = self._spec.name
        report = await verify(name, target=target, connection=self._spec.conninfo, tables=[table], limits=self._limits, changed=True)
        self._state.verifications |= {each.table: each for each in report.results}
        (found,) = report.tables
        if found.left_out is not None:
            self._leave_out(table, found.left_out)
        elif not found.equal:
            hint = f"`subscriber verify {name} --table {table}` names the rows, and --repair corrects them"
            _log.warning(
                'table "%s" differs from the publisher\'s as of %s: %s (hint: %s)', table, report.results[0].lsn, found.summary, hint
            )

    def _leave_out(self, table: TableName, reason: str) -> None:
        self._failed[table] = time.time()
        if self._told.get(table) != reason:
            self._told[table] = reason
            _log.warning('table "%s" could not be compared: %s; this is retried', table, reason)
