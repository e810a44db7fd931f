"""The verbs: cut over, abort, roll back, complete, rehearse, and the plan of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from subscriber import crash_points
from subscriber.errors import ConfigurationError, SubscriberError, SubscriptionInUse, raise_all
from subscriber.interfaces.sequences import SequenceState
from subscriber.subscription.cutover.clients import PooledClients
from subscriber.subscription.cutover.link import drop_unused_catalog, opened_catalog
from subscriber.subscription.cutover.move import BACKWARD, FORWARD, Tell
from subscriber.subscription.cutover.moved_sequences import cutover_sequences, sequence_left, sequences_step
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.subscription.cutover.preflight import find_cutover_problems, lag, unfenced
from subscriber.subscription.cutover.refreshed_views import views_step
from subscriber.subscription.cutover.rehearsal import Rehearsal
from subscriber.subscription.cutover.situation import NEW, OLD, Cutover, opened_cutover, quiet, require_given
from subscriber.subscription.cutover.unreplicated import require_replicated, unreplicated_problems
from subscriber.subscription.management.drop import drop_subscription
from subscriber.subscription.management.sequences import default_sequences
from subscriber.subscription.targets import is_postgres, observe_target
from subscriber.walreceiver.fences.fence_kinds import FenceKind
from subscriber.walreceiver.fences.fence_row import FenceRow, State

__all__ = ["abort_cutover", "complete_cutover", "cutover", "open_target", "plan_cutover", "rehearse_cutover", "roll_back"]


async def cutover(
    name: str,
    *,
    target: str,
    options: CutoverOptions | None = None,
    publisher_admin: str | None = None,
    target_admin: str | None = None,
    tell: Tell | None = None,
) -> float | None:
    """Move the writers from the publisher of a subscription to its target.

    A cutover that was interrupted is undone first. If it had let writers into the target, it is finished instead.

    Args:
        name: of the subscription. The target's catalog must define it, and a process must run it.
        target: URL or conninfo of the target.
        options: how. An interrupted cutover needs its switch command again.
        publisher_admin: connection string of a role that may close the publisher's database; None: that of the subscription.
        target_admin: the same for the target's database; None: ``target``.
        tell: is told about each step.

    Returns:
        For how many seconds no writer could write. None: it is not known.

    Raises:
        ConfigurationError: something is wrong, and was found before writers were stopped; or a step failed, and everything was undone.
        SubscriptionInUse: another cutover of the subscription is at work.
        SubscriberError: one of the databases cannot be reached, or rejected a request.
    """
    async with opened_cutover(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell) as found:
        if found.moved and found.under_way is None:
            hint = "use --rollback to return, or --complete to remove the way back"
            raise ConfigurationError("writers use the new database already", hint=hint)
        known = options or CutoverOptions()
        if found.back is None:
            known = replace(known, way_back=False)
        if found.under_way is not None:
            direction, row = found.under_way
            if direction == BACKWARD:
                raise ConfigurationError("a rollback was interrupted", hint="use --rollback to continue it, or --abort to undo it")
            if row is not None and row.state == State.LEFT:
                require_given(row, known, "pool", whose="the interrupted cutover has")
                return await found.move(FORWARD, known, row).finish()
            await found.undo_interrupted(FORWARD, known, row)
        errors, notes = await _problems(found, known)
        raise_all(errors)
        for note in notes:
            found.tell(note)
        seconds = await found.move(FORWARD, await _resolved(found, known)).run()
        if found.back is not None and known.way_back:
            found.tell(f"keep the way back running with `subscriber run --target` for {OLD}")
        return seconds


async def _resolved(found: Cutover, options: CutoverOptions) -> CutoverOptions:
    """The options, with the sequences that the default stands for. A rollback, whose publication has other tables, sets the same ones."""
    if options.sequences:
        return options
    publications = found.found.definition.publications
    return replace(options, sequences=await default_sequences(found.old.conninfo, found.new.conninfo, publications))


async def _problems(found: Cutover, options: CutoverOptions) -> tuple[list[SubscriberError], list[str]]:
    back = found.back.name if found.back is not None and options.way_back else None
    errors, notes = await find_cutover_problems(found.found, found.old, found.new, found.forward, options=options, back=back)
    try:
        clients = PooledClients(options.pool, found.old.conninfo, found.old.title, found.new.conninfo, found.tell)
        notes += await clients.find(options.max_downtime)
    except SubscriberError as error:
        errors.append(error)
    return errors, notes


async def plan_cutover(
    name: str,
    *,
    target: str,
    options: CutoverOptions | None = None,
    publisher_admin: str | None = None,
    target_admin: str | None = None,
) -> list[str]:
    """Describe what :func:`cutover` would do, with the same arguments. Nothing is changed.

    Returns:
        Lines for people. The last ones name what would make it fail, if there is something.
    """
    options = options or CutoverOptions()
    async with opened_cutover(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=None, lock=False) as found:
        if found.moved or found.under_way is not None:
            state = "writers use the new database" if found.moved else "an interrupted cutover is undone or finished first"
            return [*_steps(found, options), state]
        errors, notes = await _problems(found, options)
        views = None if found.new.fence is None else await views_step(found.old.conninfo, found.new.conninfo, options.refresh)
        return [
            *_steps(found, await _resolved(found, options), views),
            *notes,
            *(f"error: {line}" for each in errors for line in each.lines()),
        ]


def _steps(found: Cutover, options: CutoverOptions, views: str | None = None) -> list[str]:
    fence = {
        FenceKind.READ_ONLY: "default_transaction_read_only = on; other sessions are ended. A session can override it, superusers too",
        FenceKind.REVOKE: "CONNECT is revoked from all roles but those of this program; other sessions are ended. Superusers still can",
    }[options.fence]
    compare = {"full": "all rows", "changed": "the rows that changed since their table was last found equal", "none": "no rows"}
    closes = f"close {NEW} to writers" if found.new.fence is not None else f"{NEW} cannot be closed: keep writers out yourself"
    if found.back is None:
        way = "there is no way back: this kind of target cannot be a publisher"
    elif not options.way_back:
        way = "no way back is made (--no-way-back)"
    else:
        way = f'make the way back, subscription "{found.back.name}" in {OLD}'
    limit = "" if options.max_downtime is None else f", for at most {options.max_downtime:g} s: then everything is undone"
    lines = [
        closes,
        *([f"PAUSE in PgBouncer: its clients wait, until {NEW} takes writers"] if options.pool else []),
        f"close {OLD} to writers ({fence}){limit}",
        "prove that nothing can commit there any more",
        f"wait until everything is durable in {NEW}",
        f"compare {compare[options.verify]}",
        f'stop subscription "{found.forward.name}"',
        way,
        sequences_step(options.sequences),
        *([views] if views and options.refresh == "before" else []),
        f"run the switch command (at most {options.switch_timeout:g} s): {options.switch}" if options.switch else "run no switch command",
        *(["RELOAD in PgBouncer: it must have the new address then, and RESUME at the end"] if options.pool else []),
        f"let writers into {NEW}: from here only --rollback returns to {OLD}",
        *([views] if views and options.refresh != "before" else []),
    ]
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


async def rehearse_cutover(
    name: str,
    *,
    target: str,
    options: CutoverOptions | None = None,
    publisher_admin: str | None = None,
    target_admin: str | None = None,
    tell: Tell | None = None,
) -> dict[str, float]:
    """Make everything of a :func:`cutover` that is before the fence, and measure the steps after it as far as that is possible.

    Writers go on. The clients of a pool wait for a moment: they are paused, and resumed.

    Returns:
        Expected seconds without writes, by step. The switch command is not run, and not among them.

    Raises:
        ConfigurationError: something would make the cutover fail.
        SubscriberError: one of the databases cannot be reached, or rejected a request.
    """
    options = options or CutoverOptions()
    # two that pause and resume the same clients would disturb each other
    lock = options.pool is not None
    async with opened_cutover(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell, lock=lock) as found:
        if found.moved or found.under_way is not None:
            raise ConfigurationError("a cutover is under way, or finished", hint="rehearse before it")
        errors, notes = await _problems(found, options)
        raise_all(errors)
        for note in notes:
            found.tell(note)
        clients = PooledClients(options.pool, found.old.conninfo, OLD, found.new.conninfo, found.tell)
        back = found.back is not None and options.way_back
        rehearsal = Rehearsal(found.old, found.new, found.forward, back=back, clients=clients, options=options)
        await rehearsal.run()
        return rehearsal.seconds


async def abort_cutover(
    name: str,
    *,
    target: str,
    pool: str | None = None,
    publisher_admin: str | None = None,
    target_admin: str | None = None,
    tell: Tell | None = None,
) -> None:
    """Undo a cutover or a rollback that was interrupted. Arguments: as :func:`cutover`, and the pool that was given to it.

    Raises:
        ConfigurationError: there is nothing to undo, or writers were let into the other database.
        SubscriberError: something could not be undone yet; repeat it.
    """
    async with opened_cutover(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell) as found:
        interrupted = found.under_way or ((FORWARD, found.old_row) if found.moved else None)
        if interrupted is None:
            raise ConfigurationError(f'no cutover of subscription "{name}" is under way', hint="there is nothing to undo")
        direction, row = interrupted
        options = CutoverOptions(pool=pool)
        require_given(row, options, "pool", whose="the interrupted cutover has")
        await found.move(direction, options, row).undo()


async def open_target(
    name: str, *, target: str, publisher_admin: str | None = None, target_admin: str | None = None, tell: Tell | None = None
) -> None:
    """Let writers into a target that an undone cutover or a rollback has left closed. Arguments: as :func:`cutover`.

    Make sure before that no writer uses it instead of the publisher: this opens it beside the publisher.

    Raises:
        ConfigurationError: a cutover is under way, or the target is not closed.
        SubscriberError: the target cannot be reached, or rejected a request.
    """
    async with opened_cutover(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell) as found:
        if found.moved or found.under_way is not None:
            raise ConfigurationError(f'a cutover of subscription "{name}" is under way', hint="use --abort, --rollback or --complete")
        if found.new.fence is None or await found.new.fence.row(own=False) is None:
            raise ConfigurationError(f"{NEW} is not closed", hint="there is nothing to open")
        if not await found.new.fence.open(State.KEPT):
            raise ConfigurationError(f"{NEW} was closed by another cutover", hint="end that one first")
        found.tell(f"writers can use {NEW}")


async def roll_back(
    name: str,
    *,
    target: str,
    options: CutoverOptions | Mapping[str, Any] | None = None,
    publisher_admin: str | None = None,
    target_admin: str | None = None,
    tell: Tell | None = None,
) -> float | None:
    """Move the writers back to the publisher, with everything that was written in the target. Arguments and errors: as :func:`cutover`.

    ``options`` may be a mapping with some options: the fence is that of the cutover then, if it is not given, and no rows are compared.
    If the cutover had a switch command, ``switch`` must be given; an empty one means none. ``options.verify`` needs a process that runs the
    way back. The subscription continues from the publisher to the target, whose database stays closed to writers.
    """
    async with opened_cutover(
        name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell, direction=BACKWARD
    ) as found:
        direction, row = found.under_way or (BACKWARD, None)
        if direction == FORWARD or (row is None and not found.moved):
            raise ConfigurationError("writers do not use the new database", hint="`subscriber cutover` moves them there; --abort undoes it")
        if row is not None and row.state == State.LEFT:
            known = options if isinstance(options, CutoverOptions) else CutoverOptions(**{**_kept(row), **(options or {})})
            require_given(row, known, "pool", whose="the interrupted rollback has")
            return await found.move(BACKWARD, known, row).finish()
        if found.back is None or await found.back.find() is None:
            raise ConfigurationError("there is no way back", hint="it was not made, or this kind of target cannot be a publisher")
        assert found.old_row is not None, "it has moved writers"
        assert found.new.fence is not None, "only PostgreSQL has a way back"
        kept = _kept(found.old_row)
        if isinstance(options, CutoverOptions):
            known = options if options.sequences else replace(options, sequences=kept.get("sequences", ()))
        else:
            before = {"verify": "none", "fence": found.old_row.kind, **kept}
            known = CutoverOptions(**{**before, **(options or {})})
            require_given(found.old_row, known, "switch", "pool", whose="the cutover had")
        if row is not None:
            await found.undo_interrupted(BACKWARD, known, row)
        errors = [ConfigurationError(message, hint=hint) for message, hint in await found.new.fence.problems(known.fence)]
        errors += await unfenced(found.new, [found.back.name])
        problems, notes = await unreplicated_problems(found.new.conninfo, found.old.conninfo, known, OLD)
        try:
            await require_replicated(found.new.conninfo, found.back.name, known)
        except ConfigurationError as error:
            errors.append(error)
        sequences = await cutover_sequences(found.new.conninfo, found.old.conninfo, [found.back.name], known, dry_run=True)
        raise_all([*errors, *problems, *(sequence_left(each) for each in sequences if each.state is SequenceState.LEFT)])
        for note in notes:
            found.tell(note)
        if await found.back.is_running() and (message := await lag(found.new, found.back, known.max_lag)) is not None:
            raise ConfigurationError(message, hint="wait until the lag is small")
        return await found.move(BACKWARD, known).run()


def _kept(row: FenceRow) -> dict[str, Any]:
    """The options that the row of a move has."""
    return CutoverOptions.of_kept(row.details.get("kept"))


async def complete_cutover(
    name: str, *, target: str, publisher_admin: str | None = None, target_admin: str | None = None, tell: Tell | None = None
) -> str | None:
    """Remove everything that a cutover and its subscription have left on both sides. Arguments: as :func:`cutover`.

    The old database stays closed to writers.

    Returns:
        SQL that opens the old database.

    Raises:
        ConfigurationError: writers do not use the new database.
        SubscriptionInUse: `subscriber run` uses the catalog of the old database.
        SubscriberError: something could not be removed yet; repeat it.
    """
    admin = target_admin or target
    if is_postgres(target) and not await observe_target(target) and await drop_unused_catalog(target, admin, NEW):
        # an earlier call was interrupted before this
        (tell or quiet)(f"{NEW} has no subscription any more; its catalog is removed")
        return None
    opens = ""
    async with opened_cutover(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell) as found:
        row = found.old_row
        if found.under_way is not None or not (found.moved or (row is None and not found.found.definition.made)):
            raise ConfigurationError("writers do not use the new database", hint="--abort undoes a cutover; `subscriber drop` ends it")
        if row is not None:
            assert found.old.fence is not None, "writers were moved from PostgreSQL"
            opens = await found.old.fence.how_to_open(row)
            found.tell(f"{OLD} stays closed to writers, and this SQL opens it: {opens}")
            # the record is dropped before the subscription: that tells an interrupted call what it is doing
            async with opened_catalog(target) as catalog, catalog.claim(name) as definition:
                await catalog.update(definition.oid, {"made": False})
            crash_points.reached("cutover.removed")
            if found.back is not None and row.details.get("way_back"):
                await found.back.remove()
                found.tell("the way back is removed")
            await drop_unused_catalog(found.old.conninfo, found.old_admin, OLD, closed=True)
    await drop_subscription(name, target=target)
    crash_points.reached("cutover.removed")
    if is_postgres(target):
        try:
            await drop_unused_catalog(target, admin, NEW)
        except SubscriptionInUse as error:
            (tell or quiet)(error.one_line())
    return opens or None
