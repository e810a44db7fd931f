"""Is the subscription of this container replicating? The image's health check.

Healthy is: the target's catalog has the subscription with at least one table, every table of it is copied and in the apply
worker's hands (``pg_subscription_rel.srsubstate`` is ``r``), and a walsender of the publisher holds its slot. Anything else,
an unreachable server included, is one line on standard output and status 1. Nothing is changed on either side.

It asks the servers and not the process, because a process that lives proves little: only a slot in use and tables in state
``r`` tell that changes flow.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_CONNECT_SECONDS = 3
_CATALOG = "SELECT to_regclass('subscriber.pg_subscription_rel')"
_SUBSCRIPTION = """
SELECT s.subslotname, count(r.srrelid), count(r.srrelid) FILTER (WHERE r.srsubstate <> 'r')
FROM subscriber.pg_subscription AS s LEFT JOIN subscriber.pg_subscription_rel AS r ON r.srsubid = s.oid
WHERE s.subname = %s
GROUP BY s.subslotname
"""
_SLOT = "SELECT active FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"


class _Unhealthy(Exception):
    """Why the subscription is not replicating."""


def check(connection: str, target: str, name: str) -> None:
    """Return if the subscription replicates, else raise _Unhealthy.

    Args:
        connection: conninfo or URL of the publisher; what it lacks comes from libpq's environment variables, and its password from
            SUBSCRIBER_PUBLISHER_PASSWORD.
        target: the same of the target, with SUBSCRIBER_TARGET_PASSWORD.
        name: the subscription's.
    """
    if _row("target", target, _CATALOG) == (None,):
        raise _Unhealthy("the target has no catalog yet")
    found = _row("target", target, _SUBSCRIPTION, name)
    if found is None:
        raise _Unhealthy(f'the target has no subscription "{name}" yet')
    slot_name, tables, unready = found
    if tables == 0:
        raise _Unhealthy(f'subscription "{name}" has no tables')
    if unready:
        raise _Unhealthy(f'{unready} of {tables} tables of subscription "{name}" are not ready yet')
    slot = _row("publisher", connection, _SLOT, slot_name)
    if slot is None:
        raise _Unhealthy(f'the publisher has no replication slot "{slot_name}"')
    if slot != (True,):
        raise _Unhealthy(f'replication slot "{slot_name}" is not active')


def _row(side: str, conninfo: str, query: str, *parameters: str) -> tuple[Any, ...] | None:
    try:
        password = os.environ.get(f"SUBSCRIBER_{side.upper()}_PASSWORD")
        if password and not {"password", "service"} & conninfo_to_dict(conninfo).keys():
            # as in subscriber run, and no password of one side is offered to the other
            conninfo = make_conninfo(conninfo, password=password)
        with psycopg.connect(conninfo, connect_timeout=_CONNECT_SECONDS, autocommit=True) as session:
            return session.execute(query, parameters).fetchone()
    except psycopg.Error as error:
        # not the server's text: it may quote what it was given
        raise _Unhealthy(f"the {side} {_reason(error)}") from error


def _reason(error: psycopg.Error) -> str:
    if error.sqlstate:
        return f"refused: SQLSTATE {error.sqlstate}"
    if isinstance(error, psycopg.ProgrammingError):
        return "is not given as a connection string of PostgreSQL"
    # a failed login has no SQLSTATE
    if error.pgconn is not None and error.pgconn.needs_password:
        return "asks for a password, and none is set"
    if error.pgconn is not None and error.pgconn.used_password:
        return "rejects the login"
    return "cannot be reached"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check: 0 healthy, 1 not."""
    parser = argparse.ArgumentParser(description="Exit with 0 if the subscription is replicating, with 1 if not.")
    parser.add_argument("--connection", required=True, help="of the publisher, as given to subscriber run")
    parser.add_argument("--target", required=True, help="as given to subscriber run")
    parser.add_argument("--name", required=True, help="of the subscription, as given to subscriber run")
    given = parser.parse_args(arguments)
    try:
        check(given.connection, given.target, given.name)
    except _Unhealthy as reason:
        print(reason)  # noqa: T201 (docker inspect shows it)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
