"""The settings that every session with a PostgreSQL server gets first, and how a pooler that shares sessions is detected.

A database or a role can have defaults for most settings. Some of them change how the text of a value is written or read, hide rows, end a
long statement, or turn an error into the end of the session. :data:`PINNED` is the one list of them, for both servers, both drivers
and pg_dump. Other settings stay the server's own: those of the planner, of memory and of logs, and ``TimeZone`` in sessions that
write, because it decides how a time without zone is stored in a column with zone (:data:`READING` pins it where values are only read).

The settings are made by SQL after connecting, not by ``options`` in the startup packet as in PostgreSQL. So the user's own ``options`` (in
the string, in PGOPTIONS or in a service file) stay unchanged, and poolers accept the connection.

A pooler with transaction pooling gives each transaction to any of its sessions with the server. A setting would stay there, for the next
application that gets the session. So the first statement of a session sets nothing unless the server process is the one that the startup
named (:func:`pin`). A pooler names a process of its own. Then :func:`settle` finds out whether it keeps one server process for each client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.protocol.quoting import quote_literal

__all__ = ["BACKEND_PID", "PINNED", "READING", "Run", "as_options", "pin", "settle", "shared_session", "unpin"]

PINNED: Final[Mapping[str, str]] = {
    # how values are written and read
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "array_nulls": "on",
    "xmloption": "content",
    "xmlbinary": "base64",
    # how SQL is written and read
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "transform_null_equals": "off",
    # what is hidden: a policy must raise an error, and not hide rows
    "row_security": "off",
    "gin_fuzzy_search_limit": "0",
    "restrict_nonsystem_relation_kind": "",
    # what ends a statement or a session
    "lock_timeout": "0",
    "transaction_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "exit_on_error": "off",
    # the text of a statement may be in messages for debugging, and libpq prints them
    "client_min_messages": "warning",
    # what a transaction is
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # compiling a query on the catalogs of thousands of tables takes longer than the query
    "jit": "off",
}
"""The settings of every session. A server of an older version lacks some of them."""
READING: Final[Mapping[str, str]] = {"timezone": "UTC"}
"""Further settings of sessions that only read values."""
BACKEND_PID: Final = "SELECT pg_catalog.pg_backend_pid()"

_LASTING: Final = frozenset(
    {
        "lock_timeout",
        "transaction_timeout",
        "idle_in_transaction_session_timeout",
        "idle_session_timeout",
        "exit_on_error",
        "client_min_messages",
        "default_transaction_isolation",
        "default_transaction_read_only",
        "default_transaction_deferrable",
    }
)
_ROUNDS: Final = 5
_HINT: Final = "connect to the server itself, or to a pool with session pooling (in PgBouncer: pool_mode = session)"

Run = Callable[[str], Awaitable[int]]
"""Runs a query that returns one integer."""


def pin(pid: int, further: Mapping[str, str] | None = None) -> str:
    """Statements for one simple query. If the server process is not this one, they do nothing, and the last one returns no row.

    Args:
        pid: of the server process.
        further: more settings.
    """
    here = f"pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {pid}"
    return f"{_first('false')} WHERE {here}; {_rest(further or {}, 'false')} AND {here}"


def unpin() -> str:
    """Statements that give a session the database's own settings, as an application has them, but none that ends it or its statements."""
    return f"RESET ALL; SELECT pg_catalog.set_config('statement_timeout', '0', false); {_rest({}, 'false', _LASTING)}"


def _first(local: str) -> str:
    # without operators, which a search_path could replace, and quicker than any timeout that a statement_timeout may have
    return f"SELECT pg_catalog.set_config('search_path', '', {local}), pg_catalog.set_config('statement_timeout', '0', {local})"


def _rest(further: Mapping[str, str], local: str, only: Collection[str] = PINNED) -> str:
    wanted = {**{name: value for name, value in PINNED.items() if name in only}, **further}
    values = ", ".join(f"({quote_literal(name)}, {quote_literal(value)})" for name, value in wanted.items())
    return (
        f"SELECT pg_catalog.set_config(v.name, v.setting, {local}) FROM (VALUES {values}) AS v (name, setting)"  # noqa: S608
        " WHERE pg_catalog.current_setting(v.name, true) IS NOT NULL"
    )


def as_options(version: int) -> str:
    """The settings for ``options`` of libpq.

    Args:
        version: the server's ``server_version_num``.
    """
    lacking = {
        *(("idle_session_timeout",) if version < 140000 else ()),
        *(("transaction_timeout",) if version < 170000 else ()),
        # also in later minor versions; pg_dump itself sets it
        "restrict_nonsystem_relation_kind",
    }
    pinned = {"statement_timeout": "0", **PINNED, **READING}
    return " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in pinned.items() if name not in lacking)


async def settle(run: Run, another: Callable[[], AbstractAsyncContextManager[Run]], what: str) -> int:
    """Return the server process of a session behind a pooler, if no other client gets it while the session lasts.

    Args:
        run: runs a query in the session.
        another: opens one more session with the same pooler, and gives what runs queries there in a transaction that stays open.
        what: "target" or "publisher".

    Raises:
        ConfigurationError: the pooler shares sessions between its clients.
    """
    pid = await run(BACKEND_PID)
    for _ in range(_ROUNDS):
        async with another() as elsewhere:
            # the pool's next free session, while this one is between two transactions
            if await elsewhere(BACKEND_PID) == pid or await run(BACKEND_PID) != pid:
                raise shared_session(what)
    return pid


def shared_session(what: str) -> ConfigurationError:
    """The error for a pooler that gives transactions of one client to several sessions."""
    return ConfigurationError(
        f"the {what} is behind a connection pooler with transaction pooling: settings and locks of a session would stay for other clients",
        hint=_HINT,
    )
