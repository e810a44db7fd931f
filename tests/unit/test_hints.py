"""A hint belongs to the error that it follows."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import subscriber
from subscriber.apply.receiving.spool_file import spool_failure
from subscriber.errors import ApplyError, RelationError, SubscriberError, TargetUnavailable
from subscriber.sinks.postgres.apply.change_sql import control, set_role
from subscriber.sinks.postgres.apply.error_reports import apply_error
from subscriber.sinks.postgres.session.pipeline import StatementFailed
from subscriber.sinks.postgres.session.postgres_errors import Diagnostics, target_error, translated
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.session.target import _refusal
from subscriber.sinks.spark.files.file_errors import os_errors as storing
from subscriber.sinks.sqlalchemy.session.database_errors import translated as sqlalchemy_translated
from subscriber.walreceiver.publisher_errors import connect_error

NO_MORE_FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
SAID = f"could not create socket: {os.strerror(errno.EMFILE)}"


def files_of_the_target() -> SubscriberError:
    with pytest.raises(TargetUnavailable) as caught, translated():
        raise NO_MORE_FILES
    return caught.value


def files_of_another_target() -> SubscriberError:
    with pytest.raises(TargetUnavailable) as caught, sqlalchemy_translated():
        raise NO_MORE_FILES
    return caught.value


def files_of_a_lake() -> SubscriberError:
    with pytest.raises(TargetUnavailable) as caught, storing("a file"):
        raise NO_MORE_FILES
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        connect_error(psycopg.OperationalError(SAID)),
        _refusal(SAID),
        spool_failure("open", Path("/tmp/spool"), NO_MORE_FILES),
        files_of_the_target(),
        files_of_another_target(),
        files_of_a_lake(),
    ],
    ids=["publisher", "connecting to the target", "spool", "target", "other target", "lake"],
)
def test_too_many_open_files(error: SubscriberError) -> None:
    assert error.hint == "this process may not open more files: increase its limit (ulimit -n)"


def test_a_pooler_in_front_of_the_publisher() -> None:
    said = "connection failed: FATAL:  unsupported startup parameter: replication"
    assert "connection pooler" in (connect_error(psycopg.OperationalError(said)).hint or "")


def test_other_reasons_keep_their_hints() -> None:
    assert connect_error(psycopg.OperationalError("Connection refused")).hint == "check that the publisher runs, and host and port"


@pytest.mark.parametrize(
    ("statement", "says", "keeps_quiet_about"),
    [
        (set_role("owner"), "set run_as_owner = true", "tables' owner or a superuser"),
        (control("UPDATE subscriber.position"), "the target's role", "run_as_owner"),
        (Statement(b"INSERT INTO t", message_type="INSERT"), "the table's owner; with run_as_owner = true, the target's role", "or set"),
    ],
    ids=["becoming the owner", "the position", "a change"],
)
def test_a_privilege(statement: Statement, says: str, keeps_quiet_about: str) -> None:
    """The bug was that run_as_owner was recommended where it was set already."""
    hint = apply_error(StatementFailed(Diagnostics("42501", "permission denied"), statement, None, ([], []))).hint
    assert hint is not None
    assert says in hint
    assert keeps_quiet_about not in hint


@pytest.mark.parametrize(
    ("sqlstate", "says"),
    [
        ("55P03", "lock_timeout"),
        ("57014", "statement_timeout"),
        ("25P03", "idle_in_transaction"),
        ("53300", "max_connections"),
        ("40001", "temporary error"),
    ],
)
def test_why_the_target_is_away(sqlstate: str, says: str) -> None:
    assert says in (target_error(Diagnostics(sqlstate, "no")).hint or "")


def test_a_missing_function_of_a_trigger_is_not_about_the_table() -> None:
    assert "compare" in (target_error(Diagnostics("42703", "no such column")).hint or "")
    assert "compare" not in (target_error(Diagnostics("42883", "no such function", context="PL/pgSQL function f()")).hint or "")


def test_each_error_that_was_found_has_its_own_hint() -> None:
    error = RelationError("table a is missing", hint="create it")
    error.also = [ApplyError("b is too long", hint="make it shorter"), ApplyError("c is odd")]
    assert error.lines() == ["table a is missing (hint: create it)", "b is too long (hint: make it shorter)", "c is odd"]
    assert error.one_line() == "table a is missing (hint: create it); also: b is too long (hint: make it shorter); also: c is odd"


def hints() -> Iterator[tuple[str, str]]:
    """All literal hints of the package, each with its module. Plugins and tests are read by their developers."""
    package = Path(subscriber.__file__).parent
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in {"plugins", "testing"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.keyword(arg="hint", value=value) | ast.Assign(targets=[ast.Attribute(attr="hint")], value=value):
                    for part in ast.walk(value):
                        match part:
                            case ast.Constant(value=str() as text):
                                yield f"{path.name}:{part.lineno}", text


@pytest.mark.slow
def test_no_hint_is_for_the_developer_of_a_sink() -> None:
    """The bug was that an operator who lost a session was told to open the sink again."""
    found = {
        place: text
        for place, text in hints()
        if re.search(r"\bsinks?\b|\w_\w+\(|set_position|^(begin|describe|open) (it )?(again|first)", text)
    }
    assert found == {}
