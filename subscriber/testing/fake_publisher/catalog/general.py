"""Statements that every client may send: transactions, settings, and facts about the server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend.results import BOOL, INT4, NAME, TEXT, Result, known, literals, result
from subscriber.testing.fake_publisher.server_errors import ServerError

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["ENDINGS", "QUERIES"]

_LEVEL: Final = re.compile("REPEATABLE READ|SERIALIZABLE")
_PAIR: Final = re.compile(r"\('([^']*)', '([^']*)'\)")


def _begin(session: Session, values: Mapping[str, str]) -> Result:
    session.begin(values.get("mode", ""))
    return Result("BEGIN")


def _commit(session: Session, values: Mapping[str, str]) -> Result:
    failed = session.status == "E"
    _require_begun(session)
    session.end_transaction()
    return Result("ROLLBACK" if failed else "COMMIT")


def _require_begun(session: Session) -> None:
    if session.status == "I":
        session.warn("25P01", "there is no transaction in progress")


def _rollback(session: Session, values: Mapping[str, str]) -> Result:
    _require_begun(session)
    session.end_transaction()
    return Result("ROLLBACK")


def _set_savepoint(session: Session, values: Mapping[str, str]) -> Result:
    session.set_savepoint(values["name"])
    return Result("SAVEPOINT")


def _release_savepoint(session: Session, values: Mapping[str, str]) -> Result:
    session.release_savepoint(values["name"])
    return Result("RELEASE")


def _rollback_to_savepoint(session: Session, values: Mapping[str, str]) -> Result:
    session.rollback_to_savepoint(values["name"])
    return Result("ROLLBACK")


def _import_snapshot(session: Session, values: Mapping[str, str]) -> Result:
    if session.status != "T":
        session.warn("25P01", "SET TRANSACTION can only be used in transaction blocks")
    if not {"REPEATABLE READ", "SERIALIZABLE"} & set(_LEVEL.findall(session.transaction_mode)):
        raise ServerError("0A000", "a snapshot-importing transaction must have isolation level SERIALIZABLE or REPEATABLE READ")
    session.snapshot = session.publisher.imported_snapshot(values["name"])
    return Result("SET")


def _set_level(session: Session, values: Mapping[str, str]) -> Result:
    session.transaction_mode = values["level"].upper()
    return Result("SET")


def _set(session: Session, values: Mapping[str, str]) -> Result:
    name = values["name"].removeprefix("SESSION ").removeprefix("LOCAL ")
    value = values["value"]
    session.set_parameter(name, literals(value)[0] if literals(value) else value)
    return Result("SET")


def _set_config(session: Session, values: Mapping[str, str]) -> Result:
    session.set_parameter(values["name"], values["value"])
    return result({"set_config": TEXT}, [(values["value"],)])


def _set_two(session: Session, values: Mapping[str, str]) -> Result:
    if int(values["pid"]) != session.pid:
        return result({"set_config": TEXT}, [])
    for name, value in (("first", "one"), ("second", "two")):
        session.set_parameter(values[name], values[value])
    return result({"set_config": TEXT, "set_config_1": TEXT}, [(values["one"], values["two"])])


def _set_configs(session: Session, values: Mapping[str, str]) -> Result:
    if int(values["pid"]) != session.pid:
        return result({"set_config": TEXT}, [])
    pairs = [(name, value) for name, value in _PAIR.findall(values["pairs"]) if session.publisher.knows_parameter(session, name)]
    for name, value in pairs:
        session.set_parameter(name, value)
    return result({"set_config": TEXT}, [(value,) for _, value in pairs])


def _show(session: Session, values: Mapping[str, str]) -> Result:
    name = values["name"].strip('"')
    return result({name.lower(): TEXT}, [(session.publisher.parameter(session, name),)], "SHOW")


def _current_setting(session: Session, values: Mapping[str, str]) -> Result:
    return result({"current_setting": TEXT}, [(session.publisher.parameter(session, values["name"]),)])


def _database(session: Session, values: Mapping[str, str]) -> Result:
    return result({"current_database": NAME}, [(session.database,)])


def _version(session: Session, values: Mapping[str, str]) -> Result:
    text = f"PostgreSQL {session.publisher.version_text} (fake publisher) on x86_64-pc-linux-gnu, 64-bit"
    return result({"version": TEXT}, [(text,)])


def _one(session: Session, values: Mapping[str, str]) -> Result:
    return result({"?column?": INT4}, [(1,)])


def _pid(session: Session, values: Mapping[str, str]) -> Result:
    return result({"pg_backend_pid": INT4}, [(session.pid,)])


def _in_recovery(session: Session, values: Mapping[str, str]) -> Result:
    return result({"pg_is_in_recovery": BOOL}, [(False,)])


def _wal_end(session: Session, values: Mapping[str, str]) -> Result:
    return result({"pg_current_wal_lsn": 3220}, [(session.publisher.wal.end,)])


ENDINGS: Final = frozenset({_commit, _rollback, _rollback_to_savepoint})
"""The handlers of statements that end a failed transaction, or the failed part of one."""

QUERIES: Final = (
    known("BEGIN", _begin),
    known("BEGIN {mode}", _begin),
    known("START TRANSACTION{mode}", _begin),
    known("COMMIT", _commit),
    known("COMMIT TRANSACTION", _commit),
    known("END", _commit),
    known("ROLLBACK", _rollback),
    known("ABORT", _rollback),
    known("SAVEPOINT {name}", _set_savepoint),
    known("RELEASE SAVEPOINT {name}", _release_savepoint),
    known("ROLLBACK TO SAVEPOINT {name}", _rollback_to_savepoint),
    known("SET TRANSACTION ISOLATION LEVEL {level}", _set_level),
    known("SET TRANSACTION SNAPSHOT '{name}'", _import_snapshot),
    known("SET {name} = {value}", _set),
    known("SET {name} TO {value}", _set),
    known("set {name} = {value}", _set),
    known("SHOW {name}", _show),
    known("SELECT pg_catalog.set_config('{name}', '{value}', false)", _set_config),
    known(
        """SELECT pg_catalog.set_config('{first}', '{one}', false), pg_catalog.set_config('{second}', '{two}', false)
           WHERE pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {pid}""",
        _set_two,
    ),
    known(
        """SELECT pg_catalog.set_config(v.name, v.setting, false) FROM (VALUES {pairs}) AS v (name, setting)
           WHERE pg_catalog.current_setting(v.name, true) IS NOT NULL
             AND pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {pid}""",
        _set_configs,
    ),
    known("SELECT pg_catalog.current_setting('{name}')", _current_setting),
    known("SELECT current_setting('{name}')", _current_setting),
    known("SELECT pg_catalog.current_database()", _database),
    known("SELECT current_database()", _database),
    known("SELECT version()", _version),
    known("SELECT 1", _one),
    known("SELECT pg_catalog.pg_backend_pid()", _pid),
    known("SELECT pg_is_in_recovery()", _in_recovery),
    known("select pg_is_in_recovery()", _in_recovery),
    known("SELECT pg_catalog.pg_is_in_recovery()", _in_recovery),
    known("SELECT pg_current_wal_lsn()", _wal_end),
    known("SELECT pg_catalog.pg_current_wal_lsn()", _wal_end),
)
