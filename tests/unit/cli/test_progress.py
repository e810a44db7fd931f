"""subscriber.cli.progress: bars on a terminal, otherwise nothing."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

import pytest

from subscriber.apply.progress import Quiet
from subscriber.cli.progress import Bars, Lines, copy_progress
from subscriber.interfaces import TableName
from tests.support.terminal import Terminal, terminal

ACCOUNTS, HISTORY = TableName("public", "accounts"), TableName("public", "history")


@contextlib.contextmanager
def screen() -> Iterator[Terminal]:
    """stderr is a terminal. Not a fixture: pytest replaces stderr when the test itself begins."""
    with (
        pytest.MonkeyPatch.context() as patch,
        terminal() as found,
        os.fdopen(os.dup(found.descriptor), "w", encoding="utf-8") as stream,
    ):
        patch.setattr(sys, "stderr", stream)
        yield found


def test_bars_on_a_terminal() -> None:
    with screen() as found:
        progress = copy_progress()
        assert isinstance(progress, Bars)
        for table, rows in ((ACCOUNTS, 1000), (HISTORY, None)):
            progress.started(table, rows)
        progress.advanced(ACCOUNTS, 400)
        progress.started(ACCOUNTS, 1000)  # again, after a failure
        progress.advanced(ACCOUNTS, 1200)
        progress.advanced(HISTORY, 5)
        for table in (ACCOUNTS, HISTORY):
            progress.finished(table)
        progress.finished(ACCOUNTS)
        progress.advanced(ACCOUNTS, 1)  # late news of a bar that is closed
    shown = found.shown()
    assert "public.accounts: 100%" in shown
    assert "1.20k/1.20k " in shown
    assert "public.history: 100%" in shown


def test_output_after_unfinished_progress_bars_begins_on_a_new_line() -> None:
    with screen() as found:
        progress = copy_progress()
        assert isinstance(progress, Bars)
        progress.started(ACCOUNTS, 1000)
        progress.started(HISTORY, 1000)
        progress.advanced(ACCOUNTS, 400)
        progress.close()
        progress.advanced(ACCOUNTS, 1)
        print("an error", file=sys.stderr)
    *_, last, end = found.shown().split("\n")
    assert (last.strip("\r"), end) == ("an error", "")


def test_quiet_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(copy_progress(), Quiet)


def test_quiet_where_there_is_no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with screen():
        assert sys.stderr.isatty()
        assert isinstance(copy_progress(), Quiet)


def test_lines_say_what_was_copied_at_last(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    lines.started(ACCOUNTS, 10)
    lines.advanced(ACCOUNTS, 7)
    lines.started(ACCOUNTS, 10)
    lines.advanced(ACCOUNTS, 1000)
    lines.advanced(ACCOUNTS, 234)
    assert capsys.readouterr().out == ""
    lines.finished(ACCOUNTS)
    assert capsys.readouterr().out.split() == ["public.accounts", "1,234", "rows"]
