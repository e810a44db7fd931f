"""The verbs: cut over, abort, roll back, complete, and the plan of each."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from subscriber import crash_points
from subscriber.catalog import Observation
from subscriber.errors import ConfigurationError, SubscriberError, SubscriptionInUse, TargetError, raise_all
from subscriber.subscription.cutover.link import BackLink, ForwardLink, drop_unused_catalog, opened_catalog
from subscriber.subscription.cutover.move import BACKWARD, FORWARD, Move, Place, Tell
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.subscription.cutover.preflight import find_cutover_problems, lag, unfenced
from subscriber.subscription.cutover.record import Record
from subscriber.subscription.management.drop import drop_subscription
from subscriber.subscription.targets import has_sequences, is_postgres, observe_target, target_kind
from subscriber.walreceiver.fences.fence import Fence
from subscriber.walreceiver.fences.fence_kinds import FenceKind
from subscriber.walreceiver.session import Session

__all__ = ["abort_cutover", "complete_cutover", "cutover", "open_target", "plan_cutover", "roll_back"]

_OLD: Final = "the old database"
_NEW: Final = "the new database"
_BYTES: Final = 63
_SWITCH: Final = "give it again with --switch (for none, --switch ''); or use --abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cutover:
    """What is known of one cutover."""

    found: Observation
    record: Record
    old: Place
    new: Place
    forward: ForwardLink
    back: BackLink | None
    tell: Tell
    old_admin: str

    @property
    def name(self) -> str:
        return self.found.definition.name

    @property
    def publisher(self) -> str:
        return self.old.conninfo

    def options(self, direction: str, switch: str | None = None) -> CutoverOptions | None:
        """The options of a move that was begun, with a switch command: that is not in the record."""
        entry = self.record.entries.get(f"{direction}plan")
        return None if entry is None else CutoverOptions.of_record(entry.details["options"], switch)

    def has_switch(self, direction: str) -> bool:
        """Whether a move that was begun has a switch command."""
        return bool(self.record.entries[f"{direction}plan"].details["options"].get("switch"))

    async def continued(self, direction: str, switch: str | None) -> CutoverOptions | None:
        """The options of a move that has begun a step. A plan without a step was not begun: everything is checked again."""
        known = self.options(direction, switch)
        if known is None:
            return None
        move = self.move(direction, known)
        if not move.begun:
            await self.record.forget(*move.keys)
            return None
        if switch is None and self.has_switch(direction) and not self.record.made(move.key("switch")):
            raise ConfigurationError("the interrupted cutover has a switch command, which is not stored", hint=_SWITCH)
        return known

    def move(self, direction: str, options: CutoverOptions) -> Move:
        if direction == FORWARD:
            back = self.back if options.way_back else None
            return Move(
                direction,
                source=self.old,
                destination=self.new,
                link=self.forward,
                back=back,
                record=self.record,
                options=options,
                tell=self.tell,
            )
        if self.back is None:
            raise ConfigurationError("this kind of target has no way back", hint="its changes since the switch are only there")
        return Move(
            direction,
            source=self.new,
            destination=self.old,
            link=self.back,
            back=self.forward,
            record=self.record,
            options=options,
            tell=self.tell,
        )

    def require_no_completion(self) -> None:
        if "complete" in self.record.entries:
            raise ConfigurationError("the cutover is being completed", hint="use --complete again to finish that")


def _quiet(_: str) -> None:
    """Print no progress."""


async def _observed(name: str, target: str) -> Observation:
    if not has_sequences(target):
        raise ConfigurationError(
            f"an application cannot be switched to {target_kind(target).noun}",
            hint="use `subscriber run --until-caught-up` to let it catch up once",
        )
    for each in await observe_target(target):
        if each.definition.name == name:
            return each
    raise TargetError(
        f'subscription "{name}" does not exist', sqlstate="42704", hint="`subscriber status` lists the existing subscriptions"
    )


@contextlib.asynccontextmanager
async def _opened(
    name: str, target: str, *, publisher_admin: str | None, target_admin: str | None, tell: Tell | None, aborting: bool = False
) -> AsyncIterator[_Cutover]:
    """Open everything, and keep other cutovers of this subscription out."""
    found = await _observed(name, target)
    publisher = found.definition.conninfo
    if publisher is None:
        raise ConfigurationError(
            f'subscription "{name}" is defined by its command line, or this role may not read its definition',
            hint=f"define it in the catalog: stop its run, then `subscriber alter {name} --connection …` and `subscriber run --target …`",
        )
    other = not is_postgres(target)
    definition = found.definition
    old_admin, new_admin = publisher_admin or publisher, target_admin or target
    async with opened_catalog(target) as catalog:
        oid = definition.oid
        await catalog.store.take_lock(f"cutover-{oid}", f'cutover of subscription "{name}"', 0)
        record = Record(catalog.store, oid)
        await record.load()
        try:
            old_roles, old_names = await _roles(_OLD, publisher, old_admin)
            new_roles, new_names = ([], []) if other else await _roles(_NEW, target, new_admin)
        except SubscriberError:
            begun = next((each for each in (BACKWARD, FORWARD) if f"{each}plan" in record.entries), None)
            if aborting and begun is not None and f"{begun}open" not in record.entries:
                # the next call undoes it
                await record.begin(f"{begun}abort")
            raise
        slot = next(
            (str(entry.details["slot"]) for step, entry in record.entries.items() if step.endswith("plan")), definition.slot_name or name
        )
        back = f"{slot[: _BYTES - 5]}_back"

        def fence(conninfo: str, place: str, roles: Sequence[str], names: Sequence[str]) -> Fence:
            return Fence(conninfo, name, place, slot=slot, others=[back], roles=roles, names=names)

        yield _Cutover(
            found=found,
            record=record,
            old=Place(title=_OLD, conninfo=publisher, fence=fence(old_admin, _OLD, old_roles, old_names)),
            new=Place(title=_NEW, conninfo=target, fence=None if other else fence(new_admin, _NEW, new_roles, new_names)),
            forward=ForwardLink(name, publisher=publisher, target=target, admin=old_admin, slot=slot),
            back=None
            if other
            else BackLink(
                back,
                publisher=target,
                target=publisher,
                admin=new_admin,
                target_admin=old_admin,
                tables=[each.table for each in found.tables],
            ),
            tell=tell or _quiet,
            old_admin=old_admin,
        )


async def _roles(place: str, *conninfos: str) -> tuple[list[str], list[str]]:
    """Roles of connection strings, and the application names that they set."""
    roles, names = dict[str, None](), dict[str, None]()
    for conninfo in conninfos:
        async with await Session.connect(conninfo, application_name="subscriber cutover") as session:
            ((role, called, pid),) = await session.execute(
                "SELECT session_user, pg_catalog.current_setting('application_name'), pg_catalog.pg_backend_pid()"
            )
            if str(session.pgconn.backend_pid) != pid:
                # the sessions of this program may write in a closed database; a pooler may give them to others
                raise ConfigurationError(
                    f"{place} is reached through a connection pooler, which would give writers the sessions of this program",
                    hint="give the address of the server itself: in --target, --publisher-admin and --target-admin, and with"
                    " `subscriber alter --connection`",
                )
        roles[role or ""] = None
        if called and called != "subscriber cutover":
            names[called] = None
    return list(roles), list(names)


async def cutover(
    name: str,
    *,
    target: str,
    options: CutoverOptions | None = None,
    publisher_admin: str | None = None,
    target_admin: str | None = None,
    tell: Tell | None = None,
) -> float | None:
    """Move the writers from the publisher of a subscription to its target, or continue an interrupted cutover.

    Args:
        name: of the subscription. The target's catalog must define it, and a process must run it.
        target: URL or conninfo of the target.
        options: how. An interrupted cutover continues with its own.
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
    async with _opened(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell) as found:
        found.require_no_completion()
        if f"{BACKWARD}plan" in found.record.entries:
            raise ConfigurationError("a rollback was interrupted", hint="use --rollback to continue it, or --abort to undo it")
        if found.record.made("open"):
            hint = "use --rollback to return, or --complete to remove the way back"
            raise ConfigurationError("writers use the new database already", hint=hint)
        known = await found.continued(FORWARD, None if options is None else options.switch)
        if known is None:
            known = options or CutoverOptions()
            known = known if found.back is not None else _without_way_back(known)
            errors, notes = await _problems(found, known)
            raise_all(errors)
            for note in notes:
                found.tell(note)
            await found.record.begin("plan", {"options": known.recorded(), "slot": found.forward.slot})
        else:
            found.tell("an interrupted cutover continues with its own options")
        seconds = await found.move(FORWARD, known).run()
        if found.back is not None and known.way_back:
            found.tell(f"keep the way back running with `subscriber run --target` for {_OLD}")
        return seconds


def _without_way_back(options: CutoverOptions) -> CutoverOptions:
    return replace(options, way_back=False)


async def _problems(found: _Cutover, options: CutoverOptions) -> tuple[list[SubscriberError], list[str]]:
    back = found.back.name if found.back is not None and options.way_back else None
    return await find_cutover_problems(found.found, found.old, found.new, found.forward, options=options, back=back)


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
    async with _opened(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=None) as found:
        made = [step for step in found.record.entries if found.record.made(step)]
        errors, notes = ([], []) if made else await _problems(found, options)
        already = [f"made already: {step}" for step in made]
        return [*_steps(found, options), *already, *notes, *(f"error: {line}" for each in errors for line in each.lines())]


def _steps(found: _Cutover, options: CutoverOptions) -> list[str]:
    fence = {
        FenceKind.READ_ONLY: "default_transaction_read_only = on; other sessions are ended. A session can override it, superusers too",
        FenceKind.REVOKE: "CONNECT is revoked from all roles but those of this program; other sessions are ended. Superusers still can",
    }[options.fence]
    compare = {"full": "all rows", "changed": "the rows that changed since their table was last found equal", "none": "no rows"}
    closes = f"close {_NEW} to writers" if found.new.fence is not None else f"{_NEW} cannot be closed: keep writers out yourself"
    if found.back is None:
        way = "there is no way back: this kind of target cannot be a publisher"
    elif not options.way_back:
        way = "no way back is made (--no-way-back)"
    else:
        way = f'make the way back, subscription "{found.back.name}" in {_OLD}'
    limit = "" if options.max_downtime is None else f", for at most {options.max_downtime:g} s: then everything is undone"
    lines = [
        closes,
        f"close {_OLD} to writers ({fence}){limit}",
        "prove that nothing can commit there any more",
        f"wait until everything is durable in {_NEW}",
        f"compare {compare[options.verify]}",
        f'stop subscription "{found.name}"',
        way,
        {"none": "set no sequences", "all": "set all sequences", "published": "set the sequences of the published tables"}[
            options.sequences
        ],
        f"run the switch command (at most {options.switch_timeout:g} s): {options.switch}" if options.switch else "run no switch command",
        f"let writers into {_NEW}: from here only --rollback returns to {_OLD}",
    ]
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


async def abort_cutover(
    name: str, *, target: str, publisher_admin: str | None = None, target_admin: str | None = None, tell: Tell | None = None
) -> None:
    """Undo a cutover or a rollback that was interrupted. Arguments: as :func:`cutover`.

    Raises:
        ConfigurationError: there is nothing to undo, or writers were let into the other database.
        SubscriberError: something could not be undone yet; repeat it.
    """
    async with _opened(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell, aborting=True) as found:
        found.require_no_completion()
        for direction in (BACKWARD, FORWARD):
            known = found.options(direction)
            if known is not None:
                await found.move(direction, known).undo()
                return
        raise ConfigurationError(f'no cutover of subscription "{name}" is under way', hint="there is nothing to undo")


async def open_target(
    name: str, *, target: str, publisher_admin: str | None = None, target_admin: str | None = None, tell: Tell | None = None
) -> None:
    """Let writers into a target that an undone cutover or a rollback has left closed. Arguments: as :func:`cutover`.

    Make sure before that no writer uses it instead of the publisher: this opens it beside the publisher.

    Raises:
        ConfigurationError: a cutover is under way, or the target is not closed.
        SubscriberError: the target cannot be reached, or rejected a request.
    """
    async with _opened(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell) as found:
        if found.record.entries:
            raise ConfigurationError(f'a cutover of subscription "{name}" is under way', hint="use --abort, --rollback or --complete")
        if found.new.fence is None or await found.new.fence.is_opened():
            raise ConfigurationError(f"{_NEW} is not closed", hint="there is nothing to open")
        await found.new.fence.open()
        found.tell(f"writers can use {_NEW}")


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
    async with _opened(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell) as found:
        found.require_no_completion()
        if not found.record.made("open"):
            raise ConfigurationError("writers do not use the new database", hint="`subscriber cutover` moves them there; --abort undoes it")
        forward = found.options(FORWARD)
        if forward is None or not forward.way_back or found.back is None:
            raise ConfigurationError("there is no way back", hint="it was not made, or this kind of target cannot be a publisher")
        given = options.switch if isinstance(options, CutoverOptions) else (options or {}).get("switch")
        known = await found.continued(BACKWARD, given)
        if known is None:
            if isinstance(options, CutoverOptions):
                known = options
            else:
                if given is None and found.has_switch(FORWARD):
                    raise ConfigurationError("the cutover had a switch command, which is not stored", hint=_SWITCH.partition(";")[0])
                before = {"fence": forward.fence, "switch_timeout": forward.switch_timeout}
                known = CutoverOptions(**{"verify": "none", **before, **(options or {})})
            assert found.new.fence is not None, "such a target has a fence"
            errors = [ConfigurationError(message, hint=hint) for message, hint in await found.new.fence.problems(known.fence)]
            raise_all([*errors, *await unfenced(found.new, [found.back.name])])
            if await found.back.is_running() and (message := await lag(found.new, found.back, known.max_lag)) is not None:
                raise ConfigurationError(message, hint="wait until the lag is small")
            await found.record.begin(f"{BACKWARD}plan", {"options": known.recorded(), "slot": found.forward.slot})
        move = found.move(BACKWARD, known)
        seconds = await move.run()
        await found.record.forget(*move.keys, *found.move(FORWARD, forward).keys)
        return seconds


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
    if is_postgres(target) and not await observe_target(target) and await drop_unused_catalog(target, admin, _NEW):
        # an earlier call was interrupted before this
        (tell or _quiet)(f"{_NEW} has no subscription any more; its catalog is removed")
        return None
    async with _opened(name, target, publisher_admin=publisher_admin, target_admin=target_admin, tell=tell) as found:
        forward = found.options(FORWARD)
        if forward is None or not found.record.made("open") or f"{BACKWARD}plan" in found.record.entries:
            raise ConfigurationError("writers do not use the new database", hint="--abort undoes a cutover; `subscriber drop` ends it")
        assert found.old.fence is not None, "writers were moved from PostgreSQL"
        # the first call drops the fence's row. The SQL itself is not stored, because people run it
        closed = (await found.record.begin("complete", {"closed": await found.old.fence.closed_by()})).details["closed"]
        opens = await found.old.fence.how_to_open(*closed) if closed else ""
        if opens:
            found.tell(f"{_OLD} stays closed to writers, and this SQL opens it: {opens}")
        if found.back is not None and forward.way_back:
            await found.back.remove()
            found.tell("the way back is removed")
        await drop_unused_catalog(found.publisher, found.old_admin, _OLD, closed=True)
    await drop_subscription(name, target=target)
    crash_points.reached("cutover.removed")
    if is_postgres(target):
        try:
            await drop_unused_catalog(target, admin, _NEW)
        except SubscriptionInUse as error:
            (tell or _quiet)(error.one_line())
    return opens or None
