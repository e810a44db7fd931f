"""Completion and manual pages are generated from the parser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from subscriber.cli.help.arguments import arguments, verbs_of
from subscriber.cli.help.completion import SHELLS, completion
from subscriber.cli.help.manual import manual_pages
from subscriber.cli.main import main
from subscriber.cli.parser import make_parser
from subscriber.config import PARAMETERS
from subscriber.config.file.sections import APPLIER, LOG, SUBSCRIPTION, TARGET

LONGEST = 120
CASES = {
    "st": {"status"},
    "config s": {"show", "schema", "systemd"},
    "config show --eff": {"--effective"},
    "run --log-f": {"--log-format", "--log-file"},
    "run --log-format ": {"text", "json"},
    "run -o copy_d": {"copy_data="},
    "-v check --quiet --unt": set(),
}


@pytest.mark.parametrize("line", CASES)
def test_bash(line: str, tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(completion("bash", make_parser()))
    *before, last = line.split(" ")
    program = f'source {script}; compopt() {{ :; }}; COMP_WORDS=(subscriber {" ".join(before)} "{last}")'
    program += '; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _subscriber; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert (set(done.stdout.split()), done.stderr) == (CASES[line], "")


def test_fish(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    script = tmp_path / "completion"
    script.write_text(completion("fish", make_parser()))
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for line, expected in CASES.items():
        command = f"source {script}; complete --do-complete 'subscriber {line}'"
        done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True, check=True, env=home)
        assert ({each.split("\t")[0] for each in done.stdout.splitlines()}, done.stderr) == (expected, ""), line


def test_zsh_reads_the_script(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    script = tmp_path / "_subscriber"
    script.write_text(completion("zsh", make_parser()))
    command = f"autoload -U compinit; compinit -D -d {tmp_path}/dump; source {script}; print $_comps[subscriber]; whence -w _subscriber_run"
    done = subprocess.run(["zsh", "-f", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("_subscriber\n_subscriber_run: function\n", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_has_all_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for parser in verbs_of(make_parser()).values():
        for argument in arguments(parser):
            for option in argument.options:
                assert (f"-l {option[2:]}" if shell == "fish" and option.startswith("--") else option.lstrip("-")) in script
    assert all(f"{name}." in script if each.keyed else f"{name}=" in script for name, each in PARAMETERS.items())


def test_manual_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-q", "man", f"--directory={tmp_path}"]) == 0
    pages = manual_pages(make_parser(), "1.0")
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(pages)
    assert {"subscriber.1", "subscriber-run.1", "subscriber-schema-copy.1", "subscriber-spark-apply.1"} <= pages.keys()
    assert "\\-\\-until\\-caught\\-up" in pages["subscriber-run.1"]
    assert "\nwhere: " not in pages["subscriber-run.1"]
    if shutil.which("groff") is not None:
        for text in (pages["subscriber.1"], pages["subscriber-run.1"]):
            done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=text, capture_output=True, text=True, check=True)
            assert done.stderr == ""
    assert main(["man", "rnu"]) == 1
    assert 'there is no verb "rnu" (hint: did you mean "run"?)' in capsys.readouterr().err


def test_help_of_each_option_is_short() -> None:
    """``--help`` is read on a terminal."""
    for words, parser in verbs_of(make_parser()).items():
        assert not [each for each in arguments(parser) if len(each.help) > LONGEST], words
    for known in (LOG, TARGET, SUBSCRIPTION, APPLIER):
        assert not [name for name, each in known.items() if len(each.help) > LONGEST]
