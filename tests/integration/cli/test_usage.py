"""``--help``, ``--version`` and wrong usage of the command line."""

from __future__ import annotations

import subprocess

import pytest

from subscriber import __version__
from subscriber._implementation import implementation
from tests.support.program import PROGRAM, environment, subscriber

VERBS = {
    "run": ("--connection", "--publication", "--target", "--name", "-o", "-c", "--until-caught-up", "--until-lsn"),
    "check": ("--connection", "--publication", "--target", "--name", "-o", "-c"),
    "tail": ("--connection", "--publication", "--slot", "--format", "--messages", "--until-caught-up", "--until-lsn", "-o", "-c"),
    "decode": ("FILE", "--input"),
    "demo": ("--target", "--rows", "--seconds"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb: str) -> None:
    done = subscriber(verb, "--help")
    assert (done.status, done.errors) == (0, "")
    assert all(word in done.output for word in (*VERBS[verb], "--verbose"))
    assert verb in subscriber("--help").output


def test_version() -> None:
    done = subscriber("--version")
    assert (done.status, done.output, done.errors) == (0, f"subscriber {__version__} ({implementation()})\n", "")


def test_preloaded_program_is_the_program() -> None:
    for arguments in (("--version",), ("walk",), ("status", "--target=postgresql://x@/x?host=/nowhere")):
        real = subprocess.run([*PROGRAM, *arguments], env=environment(), capture_output=True, text=True, timeout=60, check=False)
        done = subscriber(*arguments)
        assert (done.status, done.output, done.errors) == (real.returncode, real.stdout, real.stderr)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "the following arguments are required: verb"),
        (("walk",), "invalid choice: 'walk'"),
        (("run",), "one of --target and --config is required"),
        (("run", "--connection=x", "--target=postgresql:///x"), "--connection and --publication belong together"),
        (("check", "--connection=x", "--publication=p"), "--connection, --publication and --target are required, or --config"),
        (("run", "--connection=x", "--publication=p", "--target=x", "--until-lsn=12"), 'invalid input syntax for type pg_lsn: "12"'),
        (("run", "--connection=x", "--publication=p", "--target=x", "--until-lsn=0/1", "--until-caught-up"), "not allowed with argument"),
        (("run", "--connection=x", "--publication=p", "--target=x", "--nonsense"), "unrecognized arguments: --nonsense"),
        (("tail", "--connection=x", "--publication=p", "--format=xml"), "invalid choice: 'xml'"),
        (("decode",), "the following arguments are required"),
        (("demo", "--rows=1"), "--rows"),
    ],
)
def test_wrong_usage(given: tuple[str, ...], message: str) -> None:
    done = subscriber(*given)
    assert (done.status, done.output) == (2, "")
    assert done.errors.startswith("usage: subscriber")
    assert message in done.errors
    assert "Traceback" not in done.errors
