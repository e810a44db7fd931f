"""Convert errors of libpq and of the publisher.

SQLSTATE decides where there is one. libpq gives none for a failed connection attempt, and some states have several meanings: there the
text decides. If the publisher translates its messages, such an error counts as one to retry.

Text of the publisher that may hold a row's value (a row filter or an output function failed) is left out. Its log has it.
"""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg import pq

from subscriber.errors import (
    CANNOT_CONNECT_NOW,
    REQUIRE_AUTH_HINT,
    ConfigurationError,
    DataLossError,
    PublisherError,
    PublisherUnavailable,
    SlotInUse,
    SubscriberError,
    UndecidedTransaction,
    connection_hint,
)

__all__ = [
    "PLUGIN_HINT",
    "START_OVER",
    "connect_error",
    "connection_lost",
    "conninfo_error",
    "invalidation_remedy",
    "is_undecodable",
    "result_error",
]

_POOLER_HINT: Final = "a connection pooler is in front of the publisher and passes no replication on: connect to the server itself"
_CONNECT: Final[tuple[tuple[str, str, str], ...]] = (
    ("authentication method requirement", "28000", REQUIRE_AUTH_HINT),
    ("password authentication failed", "28P01", "check user and password (including the passfile)"),
    (
        "no password supplied",
        "28P01",
        "give a password in the connection string or a passfile; PGPASSWORD is not used for a connection that is stored in the target",
    ),
    (
        "no pg_hba.conf entry",
        "28000",
        "allow this host, user and database in the publisher's pg_hba.conf (database 'replication' is not needed)",
    ),
    (r"authentication failed|certificate authentication", "28000", "check the publisher's pg_hba.conf and the credentials"),
    (r'role ".*" does not exist', "28000", "check the user in the connection string"),
    (r'role ".*" is not permitted to log in', "28000", "ALTER ROLE … LOGIN on the publisher"),
    (r'database ".*" does not exist', "3D000", "check dbname in the connection string"),
    (r"permission denied for database", "42501", "GRANT CONNECT ON DATABASE … on the publisher"),
    (
        r"unsupported startup parameter",
        "08P01",
        _POOLER_HINT,
    ),
    (r"permission denied to start WAL sender|must be superuser or replication role", "42501", "ALTER ROLE … REPLICATION on the publisher"),
    (
        r"does not support SSL|certificate verify failed|server certificate for|root certificate file|could not load",
        "",
        "check the sslmode parameters",
    ),
    (r'definition of service ".*" not found|service file ".*" not found', "", "check the service in the connection service file"),
)
_PASSING = re.compile(r"the database system is (?:starting up|shutting down|in recovery mode|not (?:yet )?accepting connections)")
_TOO_MANY = re.compile(r"too many clients|too many connections|remaining connection slots|max_wal_senders")
_UNAVAILABLE: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "53300"})
_LOST: Final = re.compile(
    r"can no longer (get changes from|access) replication slot|cannot read from logical replication slot"
    r"|requested WAL segment .* has already been removed"
)
# Errors from decoding transactions that were rolled back: a streamed one with ALTER TABLE, which is not decoded without streaming; on 18
# a prepared one, which the publisher drops when memory gets short, even within a long value, and then decodes further.
_RACES: Final = re.compile(r"could not map filen(umber|ode) .* to relation OID|got sequence entry \d+ for toast chunk \d+ instead of seq")
# a server takes the commands of a walsender for SQL if the connection's parameter replication did not reach it
_COMMAND: Final = re.compile(r'"(?:IDENTIFY_SYSTEM|TIMELINE_HISTORY|[A-Z]+_REPLICATION(?:_SLOT)?)"')
# a new slot's initial snapshot fails if too many subtransactions run, or if one ends at that moment
_SNAPSHOT: Final = re.compile(r"initial slot snapshot")
_ROW_VALUE_CLASSES: Final = frozenset({"22", "23", "38", "39", "P0"})
_HINTS: Final = {
    "53300": "increase max_wal_senders (or max_connections) on the publisher",
    "53400": "drop a slot that is not needed, or increase max_replication_slots on the publisher",
    "42501": "grant the privilege to the publisher's role that connects",
}

PLUGIN_HINT: Final = "add pgoutput to output_plugin_libraries there (its default has it), and reload the configuration"
"""18.6, 17.11, 16.15, 15.19, 14.24 and later refuse a slot whose plugin is not in that list, also one that exists."""

START_OVER: Final = "`subscriber recover NAME` compares all tables with the publisher at a new slot, and writes what differs"

_INVALIDATIONS: Final = {
    "wal_removed": "increase max_slot_wal_keep_size on the publisher",
    "idle_timeout": "increase idle_replication_slot_timeout on the publisher",
    "rows_removed": "set hot_standby_feedback = on on the standby that publishes, which must use a replication slot of its primary",
    "wal_level_insufficient": "keep wal_level = logical on the publisher, and on the primary of a standby that publishes",
}


def invalidation_remedy(reason: str) -> str:
    """How to keep a slot from being invalidated again.

    Args:
        reason: ``pg_replication_slots.invalidation_reason``, or a text of the publisher that may hold it.
    """
    return next((remedy for known, remedy in _INVALIDATIONS.items() if known in reason), _INVALIDATIONS["wal_removed"])


def is_undecodable(error: SubscriberError) -> bool:
    """Whether a transaction must be received again without ``streaming``.

    Either the publisher failed to decode it (if it was rolled back, the publisher skips it then; more logical_decoding_work_mem helps,
    too), or it is not known which of its rows were rolled back (then the publisher leaves these out itself).
    """
    return isinstance(error, UndecidedTransaction) or (isinstance(error, PublisherUnavailable) and _RACES.search(str(error)) is not None)


def conninfo_error(error: psycopg.Error, conninfo: str) -> ConfigurationError:
    """Convert the error for a connection string that libpq cannot parse. The text that libpq quotes may be part of a password."""
    text = _one_line(str(error))
    if "password" in conninfo or re.search(r"://[^/]*:[^/]*@", conninfo):
        text = re.sub(r'"[^"]*"', '"…"', text)
    return ConfigurationError(
        f"invalid connection string: {text}", hint='examples: "host=db1 dbname=app user=replicator", postgresql://replicator@db1/app'
    )


def connect_error(error: psycopg.Error) -> SubscriberError:
    """Convert the error of a failed connection attempt. With several hosts, the error of any one decides."""
    text = _one_line(str(error))
    if _PASSING.search(text):
        return PublisherUnavailable(
            f"could not connect to the publisher: {text}", hint="wait until it accepts connections", sqlstate=CANNOT_CONNECT_NOW
        )
    for pattern, sqlstate, hint in _CONNECT:
        if re.search(pattern, text):
            return PublisherError(f"could not connect to the publisher: {text}", hint=hint, sqlstate=sqlstate or None)
    too_many = _TOO_MANY.search(text) is not None
    hint = _HINTS["53300"] if too_many else connection_hint(text, "check that the publisher runs, and host and port")
    return PublisherUnavailable(f"could not connect to the publisher: {text}", hint=hint, sqlstate="53300" if too_many else None)


def connection_lost(error: psycopg.Error) -> PublisherUnavailable:
    """The error for a connection that broke while in use."""
    return PublisherUnavailable(f"lost the connection to the publisher: {_one_line(str(error))}")


def result_error(result: pq.abc.PGresult, *, rows: bool = False) -> SubscriberError:
    """Convert an ErrorResponse.

    Args:
        result: with status FATAL_ERROR.
        rows: whether the publisher was reading rows, so that the text may hold values.
    """
    sqlstate = _field(result, pq.DiagnosticField.SQLSTATE)
    if sqlstate is None:
        return PublisherUnavailable(f"lost the connection to the publisher: {_one_line(result.get_error_message())}")
    text = _one_line(_field(result, pq.DiagnosticField.MESSAGE_PRIMARY) or "error without a message")
    # 53400 is also used for other limits, such as temp_file_limit
    ours = _HINTS.get(sqlstate) if sqlstate != "53400" or "replication slots" in text else None
    if "may not be used as an output plugin" in text:
        ours = PLUGIN_HINT
    if sqlstate == "42601" and _COMMAND.search(text):
        ours = _POOLER_HINT
    hint = ours or _field(result, pq.DiagnosticField.MESSAGE_HINT)
    if rows and sqlstate[:2] in _ROW_VALUE_CLASSES:
        text = f"the publisher failed on a row (SQLSTATE {sqlstate})"
        hint = "see the publisher's log for the row; usual reasons are a row filter, a generated value, or text that is not UTF-8"
    if _LOST.search(text):
        detail = _field(result, pq.DiagnosticField.MESSAGE_DETAIL)
        hint = f"{invalidation_remedy(detail or '')}; {START_OVER}"
        return DataLossError(f"{text}: {_one_line(detail)}" if detail else text, sqlstate=sqlstate, hint=hint)
    if sqlstate == "55006" and "is active" in text:
        return SlotInUse(
            text,
            sqlstate=sqlstate,
            hint="another subscriber uses this slot; stop it, or wait until the publisher notices that it has ended",
        )
    if sqlstate in _UNAVAILABLE or _RACES.search(text) or _SNAPSHOT.search(text) or sqlstate.startswith("08"):
        return PublisherUnavailable(text, sqlstate=sqlstate, hint=hint)
    return PublisherError(text, sqlstate=sqlstate, hint=_one_line(hint) if hint else None)


def _field(result: pq.abc.PGresult, field: pq.DiagnosticField) -> str | None:
    value = result.error_field(field)
    return None if value is None else value.decode(errors="replace")


def _one_line(text: str) -> str:
    return " ".join(text.split())
