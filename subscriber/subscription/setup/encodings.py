"""Warn of text that the target cannot hold, because the two databases have different encodings."""

from __future__ import annotations

from typing import Final

from subscriber.interfaces import Finding, PostgresDatabase, Sink
from subscriber.walreceiver.session import Session

__all__ = ["find_encodings"]

_ENCODING: Final = "SELECT pg_catalog.current_setting('server_encoding')"
_BYTES: Final = "SQL_ASCII"
"""This encoding converts nothing and checks nothing."""


async def find_encodings(publisher: Session, sink: Sink) -> list[Finding]:
    """Compare the encodings of the two databases.

    Raises:
        PublisherError, TargetError: one of the two cannot be queried.
    """
    ((source,),) = await publisher.execute(_ENCODING)
    destination: str | None = "UTF8"
    if isinstance(sink, PostgresDatabase):
        async with sink.querying() as query:
            if query is not None:
                ((destination,),) = await query(_ENCODING)
    if source == _BYTES and destination != _BYTES:
        message = f"the publisher's database has encoding {_BYTES}: a text that is not UTF-8 stops replication"
        return [Finding("warning", message, "correct such rows on the publisher before the copy")]
    if destination in {source, "UTF8", _BYTES}:
        return []
    message = (
        f"the target's database has encoding {destination}, the publisher's {source}: a character that the target lacks stops replication"
    )
    return [Finding("warning", message, "use a target database with ENCODING 'UTF8'")]
