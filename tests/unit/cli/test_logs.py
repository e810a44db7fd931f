"""The log: its formats, its fields, where it is written."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from subscriber.cli import main
from subscriber.cli.notices import confirm
from subscriber.cli.output import complain
from subscriber.cli.service import logs
from subscriber.cli.service.logs import ProgramLog
from subscriber.config.file.sections import LogOptions
from subscriber.errors import ConfigurationError, TargetError
from subscriber.interfaces import TableName
from subscriber.log_fields import FIELDS, error_fields, extra_fields, log_fields
from subscriber.protocol.lsn import Lsn

ROOT = Path(__file__).parents[3]
log = logging.getLogger("subscriber.apply.worker")


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[ProgramLog, Path]]:
    """A log in a file, as the only handler of the program."""
    file, root, ours = tmp_path / "subscriber.log", logging.getLogger(), logging.getLogger("subscriber")
    handler, level = ProgramLog(LogOptions(format="json", file=str(file))), ours.level
    root.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield handler, file
    root.removeHandler(handler)
    handler.configure(LogOptions())
    ours.setLevel(level)


def records(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def it_breaks(message: str, why: str) -> None:
    try:
        raise ValueError(why)
    except ValueError:
        log.exception("%s", message)


def test_records_as_json(written: tuple[ProgramLog, Path]) -> None:
    with log_fields(subscription="app"):
        log.warning('table "%s" is parked: its changes from %s on are left out', TableName("public", "a\nb\x1b"), Lsn(0x1A2B))
        error = TargetError("no", sqlstate="53100")
        log.error("line 1\nline 2", extra=error_fields(error, attempt=3, xid=77))
    log.info("skipped", extra=extra_fields(xid=5, table=None))
    it_breaks("it broke", "why")
    confirm(argparse.Namespace(quiet=False), "ready")
    complain("the end")
    found = records(written[1])
    assert all(datetime.fromisoformat(str(each.pop("time"))).tzinfo for each in found)
    traceback = str(found[3].pop("traceback"))
    logger = "subscriber.apply.worker"
    message = 'table "public.a\\u000ab\\u001b" is parked: its changes from 0/1A2B on are left out'
    assert found == [
        {
            "level": "warning",
            "logger": logger,
            "message": message,
            "subscription": "app",
            "table": "public.a\\u000ab\\u001b",
            "lsn": "0/1A2B",
        },
        {
            "level": "error",
            "logger": logger,
            "message": "line 1\\u000aline 2",
            "subscription": "app",
            "xid": 77,
            "sqlstate": "53100",
            "attempt": 3,
        },
        {"level": "info", "logger": logger, "message": "skipped", "xid": 5},
        {"level": "error", "logger": logger, "message": "it broke"},
        {"level": "notice", "logger": "subscriber", "message": "ready"},
        {"level": "error", "logger": "subscriber", "message": "the end"},
    ]
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert traceback.endswith("ValueError: why")


def test_the_reference_has_all_fields() -> None:
    page = (ROOT / "docs/reference/log.md").read_text()
    for name in (*FIELDS, "time", "level", "logger", "message", "traceback", *logs.LEVELS):
        assert f"`{name}`" in page, name


def test_a_file_is_opened_again_after_it_was_renamed(written: tuple[ProgramLog, Path], tmp_path: Path) -> None:
    handler, file = written
    log.warning("first")
    file.rename(tmp_path / "old")
    log.warning("second")
    handler.configure(handler.options)
    log.warning("third")
    assert [[each["message"] for each in records(path)] for path in (tmp_path / "old", file)] == [["first", "second"], ["third"]]
    with pytest.raises(ConfigurationError, match=r"cannot write the log file .*: Is a directory"):
        handler.configure(LogOptions(file=str(tmp_path)))
    log.warning("fourth")
    assert records(file)[-1]["message"] == "fourth"


def test_text_in_a_file_is_one_line_for_each_record(written: tuple[ProgramLog, Path]) -> None:
    handler, file = written
    handler.configure(LogOptions(file=str(file)))
    it_breaks("it\nbroke", "why\nnot")
    (line,) = file.read_text().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d .* ERROR subscriber\.apply\.worker: it\\u000abroke \| Traceback .* \| ValueError: why \| not$", line)


def test_lines_for_the_journal_have_a_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "journal").open("w") as stream:
        found = os.fstat(stream.fileno())
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        handler = ProgramLog(LogOptions())
        plain = [handler.plain]
        for level in (logging.DEBUG, logging.INFO, logs.NOTICE, logging.WARNING, logging.ERROR):
            handler.handle(logging.LogRecord("subscriber", level, "", 0, "a\nb", (), None))
        handler.configure(LogOptions(format="json"))
        handler.handle(logging.LogRecord("subscriber", logging.WARNING, "", 0, "json", (), None))
        # another stream: standard error was redirected
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino + 1}")
        handler.configure(LogOptions())
        plain.append(handler.plain)
    assert plain == [False, True]
    lines = (tmp_path / "journal").read_text().splitlines()
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<5>", "<4>", "<3>", "<4>"]
    assert lines[3] == "<4>WARNING subscriber: a\\u000ab"
    assert json.loads(lines[5][3:])["message"] == "json"


def test_a_log_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"--target=sqlite:///{tmp_path}/x.db", f"--log-file={tmp_path}/none/x.log"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'subscriber: cannot write the log file "{tmp_path}/none/x.log": No such file or directory (hint: ')
