"""Wrong values for each parameter, by each verb that takes parameters: one line, before anything is connected to."""

from __future__ import annotations

from dataclasses import fields

import pytest

from subscriber.cli import main
from subscriber.config import ALTERABLE, SubscriptionOptions

NOWHERE = "host=127.0.0.1 port=1 dbname=none"
"""Had it been tried, the error would be about it."""
VERBS: dict[str, tuple[str, ...]] = {
    "create": ("create", "sub", "--connection", NOWHERE, "--publication", "p", "--target", NOWHERE),
    "alter": ("alter", "sub", "--target", NOWHERE),
    "run": ("run", "--connection", NOWHERE, "--publication", "p", "--target", NOWHERE),
    "check": ("check", "--connection", NOWHERE, "--publication", "p", "--target", NOWHERE),
}
CASES = [
    # every text is a pattern
    *[(verb, field.name) for verb in ("create", "run", "check") for field in fields(SubscriptionOptions) if field.name != "exclude_table"],
    *[("alter", name) for name in sorted(ALTERABLE) if name != "exclude_table"],
]


def line_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(list(arguments))
    output, errors = capsys.readouterr()
    assert (status, output) == (1, "")
    (line,) = errors.splitlines()
    assert "(hint: " in line
    return str(line)


@pytest.mark.parametrize(("verb", "parameter"), CASES)
def test_wrong_value(capsys: pytest.CaptureFixture[str], verb: str, parameter: str) -> None:
    line = line_of(capsys, *VERBS[verb], "-o", f"{parameter}=@@")
    match parameter:
        case "slot_name":
            expected = 'replication slot name "@@" contains an invalid character'
        case "streaming":
            expected = 'streaming requires a Boolean value or "parallel"'
        case "synchronous_commit":
            expected = 'invalid value for parameter "synchronous_commit": "@@"'
        case "origin" | "on_error":
            expected = f'unrecognized {parameter} value: "@@"'
        case (
            "wal_receiver_timeout"
            | "max_copy_rate"
            | "max_apply_rate"
            | "copy_window"
            | "park_after"
            | "park_retry"
            | "conflict_log_retention"
        ):
            expected = f'invalid value for parameter "{parameter}": "@@"'
        case "conflict":
            expected = "conflict requires the kind of the conflict"
        case "conflict_log":
            expected = '"@@" is not of the form schema.table'
        case "where" | "map" | "columns" | "rename":
            expected = f"{parameter} requires the name of a table"
        case _:
            expected = f"{parameter} requires a Boolean value"
    assert line.startswith(f"subscriber: {expected}")


@pytest.mark.parametrize("verb", VERBS)
def test_unknown_parameter(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    line = line_of(capsys, *VERBS[verb], "-o", "colour=red")
    assert line.startswith('subscriber: unrecognized subscription parameter: "colour"')


@pytest.mark.parametrize("parameter", ["connect", "create_slot", "copy_data", "enabled"])
def test_parameters_that_alter_rejects(capsys: pytest.CaptureFixture[str], parameter: str) -> None:
    line = line_of(capsys, *VERBS["alter"], "-o", f"{parameter}=true")
    assert line.startswith(f'subscriber: unrecognized subscription parameter: "{parameter}"')


@pytest.mark.parametrize("form", ["--enable", "--disable", "--rename=x", "--skip-lsn=0/1", "--connection=dbname=x", "--reset-stats"])
def test_forms_that_take_no_parameters(capsys: pytest.CaptureFixture[str], form: str) -> None:
    line = line_of(capsys, *VERBS["alter"], form, "-o", "binary=true")
    name = form.partition("=")[0]
    assert line.startswith(f"subscriber: {name} takes no parameters (-o) (hint: run alter twice: once with {name}, once with -o)")


@pytest.mark.parametrize("verb", ["run", "check"])
def test_apply_workers_of_targets_without_sessions(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    line = line_of(capsys, *VERBS[verb][:-1], "sqlite:////nowhere/x.db", "-c", "apply_workers=2")
    assert line.startswith("subscriber: apply_workers = 2 is not available for this kind of target")
