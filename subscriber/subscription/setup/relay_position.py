"""The check at the start with a relay log: target, relay log and slot are compared.

The target must have everything up to a place in the relay log, and the slot must not be past the end of the relay log. A relay log that
does not fit, for example because it was restored from an old backup, is not needed if the slot can still send everything after the
target's position. Then it begins again there. Otherwise changes are lost.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from subscriber.config import Settings
from subscriber.errors import DataLossError
from subscriber.interfaces import Position
from subscriber.protocol.lsn import Lsn
from subscriber.threads import run_in_thread
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.position_check import check_position

if TYPE_CHECKING:
    from subscriber.recording.relay_log import RelayLog

__all__ = ["RelayPosition"]

_log = logging.getLogger(__name__)


class RelayPosition:
    """The relay log of a run, if it has one.

    Args:
        settings: of the process. None: there is no relay log.

    Attributes:
        log: the relay log, open; None: there is none, or it is not open.
    """

    def __init__(self, settings: Settings | None) -> None:
        self._settings = settings
        self.log: RelayLog | None = None

    async def open(self, key: str, *, fresh: bool = False) -> None:
        """Open the relay log, if there is one. Idempotent.

        Args:
            key: of the subscription.
            fresh: whether the target has no position, because the subscription is new, or was recovered. Then what is there is removed.

        Raises:
            SubscriberError: see :meth:`RelayLog.open`.
        """
        if self._settings is None or self._settings.relay_log is None or self.log is not None:
            return
        from subscriber.recording.relay_directory import discard_relay_log  # noqa: PLC0415 -- most runs have no relay log
        from subscriber.recording.relay_log import RelayLog  # noqa: PLC0415 -- as above

        if fresh:
            await run_in_thread(partial(discard_relay_log, self._settings.relay_log, key))
        log = RelayLog(self._settings.relay_log, self._settings.relay_log_size, key)
        try:
            await log.open()
        except BaseException:
            await log.close()
            raise
        self.log = log

    async def close(self) -> None:
        """Close it. Idempotent."""
        log, self.log = self.log, None
        if log is not None:
            await log.close()

    async def begin(self, connection: WalReceiverConnection, position: Position) -> None:
        """Begin an empty relay log at a position of the target.

        Raises:
            SpoolError: it cannot be written.
        """
        if self.log is not None:
            from subscriber.recording.file import RecordedSession  # noqa: PLC0415 -- as above

            session = RecordedSession(
                server_version=connection.capabilities.server_version,
                system_identifier=position.system_identifier,
                timeline=position.timeline,
                slot_name=position.slot_name,
                start_lsn=position.lsn,
                options={},
            )
            await self.log.begin(session)

    async def check(self, connection: WalReceiverConnection, position: Position) -> Lsn:
        """Compare. Return the LSN after which the slot sends changes: the end of the relay log, or the target's position.

        Raises:
            DataLossError: changes after the position are lost, or the position is of another publisher.
            PublisherError: the slot cannot be used.
        """
        log = self.log
        if log is None:
            await check_position(connection, position)
            return position.lsn
        source = position.slot_name, position.system_identifier
        same = not log.segments or (log.session.slot_name, log.session.system_identifier) == source
        contradiction: DataLossError | None = None
        try:
            if same and log.holds(position.lsn):
                await check_position(connection, position_of(log), holder="the relay log")
                return log.end
        except DataLossError as error:
            contradiction = error
        has = f"has changes from {log.segments[0].base} to {log.end}" if log.segments else "is empty"
        try:
            position = await check_position(connection, position)
        except DataLossError as error:
            if contradiction is not None:
                raise contradiction from None
            raise DataLossError(f'{error}; the relay log "{log.directory}" {has}', hint=error.hint) from error
        if log.segments or contradiction is not None:
            _log.warning(
                'the relay log "%s" %s: it begins again at the target\'s position %s, because the slot still has everything after that',
                log.directory,
                f"cannot be used ({contradiction})" if contradiction is not None else f"{has}, and does not fit",
                position.lsn,
            )
        await self.begin(connection, position)
        return position.lsn


def position_of(log: RelayLog) -> Position:
    """The position from which the publisher sends changes to a relay log."""
    session = log.session
    return Position(session.slot_name, session.system_identifier, session.timeline, log.end)
