"""Run the replication commands, except START_REPLICATION (:mod:`subscriber.testing.fake_publisher.replication.walsender`).

Source: PostgreSQL manual, Streaming Replication Protocol; walsender.c, slot.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subscriber.testing.fake_publisher.backend.results import INT4, INT8, TEXT, Result, result
from subscriber.testing.fake_publisher.replication.commands import (
    AlterSlot,
    Command,
    CreateSlot,
    DropSlot,
    IdentifySystem,
    ReadSlot,
    Show,
    StartReplication,
    TimelineHistory,
)
from subscriber.testing.fake_publisher.replication.plugin_options import is_known
from subscriber.testing.fake_publisher.replication.slots import Slot, check_slot_name
from subscriber.testing.fake_publisher.server_errors import ServerError

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["create_logical_slot", "drop_slot", "run_command"]


async def run_command(session: Session, command: Command) -> Result:
    """Run a command.

    Raises:
        ServerError: as a server.
    """
    publisher = session.publisher
    match command:
        case IdentifySystem():
            timeline_oid = INT8 if publisher.caps.at_least(16) else INT4
            row = (publisher.system_identifier, publisher.timeline, publisher.wal.end, session.database)
            return result({"systemid": TEXT, "timeline": timeline_oid, "xlogpos": TEXT, "dbname": TEXT}, [row], "IDENTIFY_SYSTEM")
        case Show(name):
            return result({name: TEXT}, [(publisher.parameter(session, name),)], "SHOW")
        case TimelineHistory(timeline):
            return _timeline_history(session, timeline)
        case CreateSlot():
            return await _create_slot(session, command)
        case DropSlot(name, wait):
            await drop_slot(session, name, wait=wait)
            return Result("DROP_REPLICATION_SLOT")
        case AlterSlot():
            return _alter_slot(session, command)
        case ReadSlot(name):
            if name in publisher.slots:
                raise ServerError("0A000", "cannot use READ_REPLICATION_SLOT with a logical replication slot")
            fields = {"slot_type": TEXT, "restart_lsn": TEXT, "restart_tli": INT8}
            return result(fields, [(None, None, None)], "READ_REPLICATION_SLOT")
        case StartReplication():
            raise AssertionError("START_REPLICATION is run by the session")


def _timeline_history(session: Session, timeline: int) -> Result:
    publisher = session.publisher
    if timeline == 1 or timeline > publisher.timeline:
        raise ServerError("58P01", f'could not open file "pg_wal/{timeline:08X}.history": No such file or directory')
    content = "".join(f"{ended}\t{lsn}\tno recovery target specified\n" for ended, lsn in publisher.timelines if ended < timeline)
    return result({"filename": TEXT, "content": TEXT}, [(f"{timeline:08X}.history", content)], "TIMELINE_HISTORY")


async def _create_slot(session: Session, command: CreateSlot) -> Result:
    publisher = session.publisher
    caps = publisher.caps
    if command.plugin is None:
        raise ServerError("0A000", "the fake publisher has no physical slots")
    if command.snapshot == "use":
        what = "CREATE_REPLICATION_SLOT ... (SNAPSHOT 'use')" if caps.slot_options_syntax else "CREATE_REPLICATION_SLOT ... USE_SNAPSHOT"
        if session.status != "T":
            raise ServerError("XX000", f"{what} must be called inside a transaction")
        if "REPEATABLE READ" not in session.transaction_mode:
            raise ServerError("XX000", f"{what} must be called in REPEATABLE READ isolation mode transaction")
        if "READ ONLY" not in session.transaction_mode and caps.at_least(16):
            raise ServerError("XX000", f"{what} must be called in a read-only transaction")
        if session.snapshot is not None or session.has_queried:
            raise ServerError("XX000", f"{what} must be called before any query")
    elif command.snapshot == "export" and session.status != "I":
        what = (
            "CREATE_REPLICATION_SLOT ... (SNAPSHOT 'export')" if caps.slot_options_syntax else "CREATE_REPLICATION_SLOT ... EXPORT_SNAPSHOT"
        )
        raise ServerError("XX000", f"{what} must not be called inside a transaction")
    slot = await create_logical_slot(
        session, command.name, command.plugin, temporary=command.temporary, two_phase=command.two_phase, failover=command.failover
    )
    name = None
    if command.snapshot == "export":
        name = session.exported = publisher.export_snapshot(session)
    elif command.snapshot == "use":
        session.snapshot = publisher.snapshot("")
    row = (command.name, slot.confirmed_flush_lsn, name, command.plugin)
    fields = {"slot_name": TEXT, "consistent_point": TEXT, "snapshot_name": TEXT, "output_plugin": TEXT}
    return result(fields, [row], "CREATE_REPLICATION_SLOT")


async def create_logical_slot(session: Session, name: str, plugin: str, *, temporary: bool, two_phase: bool, failover: bool) -> Slot:
    """Create a slot, by a command or in SQL.

    Raises:
        ServerError: as a server.
    """
    if failover and temporary:
        raise ServerError("0A000", "cannot enable failover for a temporary replication slot")
    check_slot_name(name)
    session.publisher.require_free(name)
    if not is_known(plugin):
        raise ServerError("58P01", f'could not access file "{plugin}": No such file or directory')
    return await session.publisher.create_slot(name, plugin, temporary=temporary, two_phase=two_phase, failover=failover, owner=session)


def _free_slot(session: Session, name: str) -> Slot:
    slot = session.publisher.slot(name)
    if slot.active_pid is not None and slot.active_pid != session.pid:
        raise ServerError("55006", f'replication slot "{name}" is active for PID {slot.active_pid}')
    return slot


async def drop_slot(session: Session, name: str, *, wait: bool) -> None:
    """Drop a slot, by a command or in SQL.

    Raises:
        ServerError: there is no such slot, or it is in use.
    """
    publisher = session.publisher
    while wait and publisher.slot(name).active_pid not in {None, session.pid}:
        await publisher.until_changed()
    _free_slot(session, name)
    del publisher.slots[name]
    publisher.changed()


def _alter_slot(session: Session, command: AlterSlot) -> Result:
    slot = _free_slot(session, command.name)
    if command.failover and slot.temporary:
        raise ServerError("0A000", "cannot enable failover for a temporary replication slot")
    if command.failover is not None:
        slot.failover = command.failover
    if command.two_phase is not None:
        slot.two_phase = command.two_phase
        if not command.two_phase:
            slot.two_phase_at = None
        elif slot.two_phase_at is None:
            slot.two_phase_at = slot.confirmed_flush_lsn
    return Result("ALTER_REPLICATION_SLOT")
