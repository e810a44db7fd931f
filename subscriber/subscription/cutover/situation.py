"""What is known of one cutover: the two databases, their rows, and the two subscriptions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.catalog import Observation
from subscriber.catalog.subscriptions import no_such_subscription
from subscriber.errors import ConfigurationError
from subscriber.subscription.cutover.link import BackLink, ForwardLink, opened_catalog
from subscriber.subscription.cutover.move import BACKWARD, FORWARD, Move, Place, Tell
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.subscription.targets import has_sequences, is_postgres, observed, target_kind
from subscriber.walreceiver.fences.fence import Fence
from subscriber.walreceiver.fences.fence_row import FenceRow, State, fence_owner
from subscriber.walreceiver.session import Session

__all__ = ["NEW", "OLD", "Cutover", "opened_cutover", "quiet", "require_given"]

OLD: Final = "the old database"
NEW: Final = "the new database"
_BYTES: Final = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutover:
    """What is known of one cutover.

    Attributes:
        found: the subscription.
        old, new: the databases.
        old_row, new_row: their rows, if cutovers of this subscription have made them.
        forward, back: the subscriptions; without ``back`` the target cannot be a publisher.
        tell: is told about each step.
        old_admin: connection string of a role that may close the old database.
    """

    found: Observation
    old: Place
    new: Place
    old_row: FenceRow | None
    new_row: FenceRow | None
    forward: ForwardLink
    back: BackLink | None
    tell: Tell
    old_admin: str

    @property
    def under_way(self) -> tuple[str, FenceRow | None] | None:
        """The direction and the record of the move that was begun and is not finished."""
        old, new = self.old_row, self.new_row
        if new is not None and new.state in State.UNDER_WAY:
            return BACKWARD, new
        if old is not None and old.state in State.UNDER_WAY:
            return FORWARD, old
        # a person has opened the old database, and so removed the record
        return (FORWARD, None) if old is None and new is not None and new.state == State.BARRED else None

    @property
    def moved(self) -> bool:
        """Whether writers use the new database."""
        return self.old_row is not None and self.old_row.state == State.MOVED

    def move(self, direction: str, options: CutoverOptions, row: FenceRow | None = None) -> Move:
        """A move of the writers. ``row``: its record, if it was begun."""
        way_back = options.way_back if row is None else bool(row.details.get("way_back"))
        if direction == BACKWARD and self.back is None:
            raise ConfigurationError("this kind of target has no way back", hint="its changes since the switch are only there")
        forward = direction == FORWARD
        back = (self.back if way_back else None) if forward else self.forward
        link = self.forward if forward else self.back
        assert link is not None
        return Move(
            direction,
            source=self.old if forward else self.new,
            destination=self.new if forward else self.old,
            link=link,
            back=back,
            slot=self.forward.slot,
            options=options,
            tell=self.tell,
            row=row,
        )

    async def undo_interrupted(self, direction: str, options: CutoverOptions, row: FenceRow | None) -> None:
        """Undo a move that was interrupted before writers were let into its destination, so that it can begin again."""
        require_given(row, options, "switch", "pool", whose="the interrupted cutover has")
        self.tell("an interrupted cutover is undone, and begins again")
        move = self.move(direction, options, row)
        await move.undo()
        await move.followed(options.max_lag)


def quiet(_: str) -> None:
    """Print no progress."""


async def _observed(name: str, target: str) -> Observation:
    if not has_sequences(target):
        raise ConfigurationError(
            f"an application cannot be switched to {target_kind(target).noun}",
            hint="use `subscriber run --until-caught-up` to let it catch up once",
        )
    found = await observed(target, name)
    if found is None:
        raise no_such_subscription(name)
    return found


@contextlib.asynccontextmanager
async def opened_cutover(
    name: str,
    target: str,
    *,
    publisher_admin: str | None,
    target_admin: str | None,
    tell: Tell | None,
    direction: str = FORWARD,
    lock: bool = True,
) -> AsyncIterator[Cutover]:
    """Find everything, and keep other cutovers of the database that writers leave out."""
    found = await _observed(name, target)
    definition, publisher = found.definition, found.definition.conninfo
    if publisher is None:
        raise ConfigurationError(
            f'subscription "{name}" is defined by its command line, or this role may not read its definition',
            hint=f"define it in the catalog: stop its run, then `subscriber alter {name} --connection …` and `subscriber run --target …`",
        )
    other = not is_postgres(target)
    old_admin, new_admin = publisher_admin or publisher, target_admin or target
    old_roles, old_names = await _roles(OLD, publisher, old_admin)
    new_roles, new_names = ([], []) if other else await _roles(NEW, target, new_admin)
    async with opened_catalog(target) as catalog:
        owner = await fence_owner(catalog.store, definition.oid)
    slot = definition.slot_name or name

    def fence(conninfo: str, place: str, roles: Sequence[str], applications: Sequence[str]) -> Fence:
        names = [slot, _back_name(slot)]
        return Fence(conninfo, name, place, owner=owner, names=names, roles=roles, applications=applications)

    old, new = fence(old_admin, OLD, old_roles, old_names), None if other else fence(new_admin, NEW, new_roles, new_names)

    def cutover_of(old_row: FenceRow | None, new_row: FenceRow | None) -> Cutover:
        slot = next((str(row.details["slot"]) for row in (old_row, new_row) if row is not None and "slot" in row.details), None)
        slot = slot or definition.slot_name or name
        return Cutover(
            found=found,
            old=Place(title=OLD, conninfo=publisher, fence=old),
            new=Place(title=NEW, conninfo=target, fence=new),
            old_row=old_row,
            new_row=new_row,
            forward=ForwardLink(
                name,
                publisher=publisher,
                target=target,
                admin=old_admin,
                slot=slot,
                publications=definition.publications,
                mapping=definition.options.mapping,
            ),
            back=None
            if other
            else BackLink(
                _back_name(slot),
                publisher=target,
                target=publisher,
                admin=new_admin,
                target_admin=old_admin,
                tables=[each.table for each in found.tables],
            ),
            tell=tell or quiet,
            old_admin=old_admin,
        )

    async def read() -> Cutover:
        return cutover_of(await old.row(), None if new is None else await new.row())

    known = await read()
    source = new if (known.under_way or (direction, None))[0] == BACKWARD else old
    try:
        if lock and source is not None:
            await source.lock()
            known = await read()
        for each in (old, new):
            if each is not None:
                each.keep_session()
        yield known
    finally:
        for each in (old, new):
            if each is not None:
                await each.unlock()


_GIVEN: Final = {"switch": "a switch command", "pool": "paused a pool"}


def require_given(row: FenceRow | None, options: CutoverOptions, *names: str, whose: str) -> None:
    """What is executed and where passwords are is not in the record: it must be given again."""
    for name in names:
        if row is not None and row.details.get(name) and getattr(options, name) is None:
            raise ConfigurationError(
                f"{whose} {_GIVEN[name]}, which is not stored", hint=f"give it again with --{name} (for none, --{name} '')"
            )


def _back_name(slot: str) -> str:
    return f"{slot[: _BYTES - 5]}_back"


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
