"""Tables that join the publications while the subscription runs, with ``new_tables = copy``: created in the target, added, and copied.

Nothing is stopped for them. The apply worker adds them to the subscription between two batches, and the launcher then synchronizes them as
it does at the start of a run. Until a table is added, its changes are left out: its copy has them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from subscriber.apply.all_changes import require_all_changes
from subscriber.apply.tables.table_state import TO_BE_ADDED, Addition
from subscriber.catalog.target_kind import SchemaKind
from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.interfaces import PublishedTable, TableName, TwoPhaseState
from subscriber.interfaces.schema import SchemaStep, Section, StepState
from subscriber.schema.inspection import SchemaScope, inspect
from subscriber.schema.mapped_schema import mapped_schema
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.run.tables.left_out_tables import LeftOutTables
from subscriber.subscription.setup.setup import Prepared
from subscriber.subscription.setup.table_refresh import NOT_WITH_TWO_PHASE, first_entry
from subscriber.subscription.spec import RunSpec
from subscriber.subscription.targets import is_postgres, target_kind
from subscriber.walreceiver.publication import published_tables
from subscriber.walreceiver.session import Session

__all__ = ["NewTables"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 60.0
"""A table that could not be added is tried again after this time."""


class NewTables:
    """Adds the new tables of one run.

    Args:
        spec: the subscription.
        state: of the run.
        prepared: where the run starts.
        left_out: finds the tables.
    """

    def __init__(self, spec: RunSpec, state: RunState, prepared: Prepared, left_out: LeftOutTables) -> None:
        self._spec = spec
        self._state = state
        self._left_out = left_out
        self._two_phase = prepared.state.two_phase
        self._failed: dict[TableName, str] = {}
        self._retry_at = 0.0
        self._told = ""

    async def run(self) -> None:
        """Look for new tables until cancelled.

        Raises:
            ConfigurationError: tables cannot be created in this target: pg_dump is missing or too old.
        """
        checked = False
        while True:
            try:
                if not checked:
                    await self._check()
                    checked = True
                await self._left_out.look()
                if new := self._new():
                    await self._add(new)
                self._told = ""
            except ConfigurationError:
                raise
            except SubscriberError as error:
                if self._told != error.one_line():
                    self._told = error.one_line()
                    _log.warning("new tables could not be added: %s; this is retried", self._told)
            await asyncio.sleep(_LOOK_SECONDS)

    def _new(self) -> Sequence[TableName]:
        """The tables to add now."""
        reasons, now = self._state.states.left_out, asyncio.get_running_loop().time()
        new = [name for name, reason in reasons.items() if reason == TO_BE_ADDED]
        if now >= self._retry_at:
            new += [name for name in reasons if name in self._failed]
            self._retry_at = now + _RETRY_SECONDS
        return new

    async def _check(self) -> None:
        if self._spec.target is not None and is_postgres(self._spec.target):
            from subscriber.schema.postgres import client_programs  # noqa: PLC0415 -- its drivers come with an extra

            try:
                await client_programs(self._spec.conninfo, self._spec.target, None)
            except ConfigurationError as error:
                error.hint = "install PostgreSQL's client programs in the publisher's version or a later one, or omit new_tables"
                raise

    async def _add(self, names: Sequence[TableName]) -> None:
        # without a copy, what was written before the table was added would be lost
        copy_data = self._spec.options.copy_data or True
        if self._two_phase is not TwoPhaseState.DISABLED:
            self._leave_out(dict.fromkeys(names, NOT_WITH_TWO_PHASE))
            return
        async with await self._spec.connect("tables") as session:
            tables = await published_tables(session, self._spec.publications, *names, mapping=self._spec.options.mapping)
            if copy_data == "reconcile":
                require_all_changes(tables)
            if not tables:
                return
            unfinished = await self._create(session, tables)
            if unfinished is not None and len(tables) > 1:
                # one of them must not stop the others
                for table in tables:
                    unfinished = await self._create(session, [table]) or unfinished
        addition = Addition(tables, first_entry(copy_data), asyncio.get_running_loop().create_future())
        self._state.states.additions.append(addition)
        self._state.wake()
        failed = await addition.result
        self._leave_out({name: unfinished or error.one_line() for name, error in failed.items()})
        if unfinished and not failed:
            _log.warning("not all that belongs to new tables was created: %s; `subscriber schema diff` shows what they lack", unfinished)
        for table in tables:
            if table.name not in failed:
                self._failed.pop(table.name, None)
                _log.warning('table "%s" is published, and was added to the subscription', table.name)

    def _leave_out(self, reasons: dict[TableName, str]) -> None:
        for name, reason in reasons.items():
            self._state.states.left_out[name] = reason
            if self._failed.get(name) != reason:
                self._failed[name] = reason
                _log.warning('table "%s" is published but not replicated: %s', name, reason)

    async def _create(self, session: Session, tables: Sequence[PublishedTable]) -> str | None:
        """Create tables, with what belongs to them. Return an error; those that exist can be added nevertheless."""
        try:
            await self._copy_schema(session, tables)
        except ConfigurationError:
            raise
        except SubscriberError as error:
            return error.one_line()
        return None

    async def _copy_schema(self, session: Session, tables: Sequence[PublishedTable]) -> None:
        target = self._spec.target
        if target is None:
            return
        names, mapping = [table.publisher_name for table in tables], self._spec.options.mapping
        kind = target_kind(target)
        if is_postgres(target):
            from subscriber.schema.archive import Selection  # noqa: PLC0415 -- its drivers come with an extra
            from subscriber.schema.postgres import SchemaOrder, copy_to_postgres  # noqa: PLC0415 -- as above

            order = SchemaOrder(
                selection=Selection(),
                renamed_roles={},
                jobs=1,
                tables=names,
                only_new_tables=True,
                publications=self._spec.publications,
                left_out_keys="skip",
                mapping=mapping,
            )
            for line in await copy_to_postgres(self._spec.conninfo, target, order, _tell):
                _log.info("%s", line)
        elif isinstance(kind, SchemaKind):
            schema = mapped_schema(await inspect(session.execute, SchemaScope(tables=names)), mapping)
            lacking = {each.name for each in await kind.compare_schema(target, tables, schema) if each.kind == "table"}
            if missing := [table for table in tables if table.name in lacking]:
                await kind.copy_schema(target, missing, schema, tuple(Section), _tell)


def _tell(step: SchemaStep) -> None:
    if step.state is StepState.CREATED:
        _log.info("%s was created in the target", step.what)
