"""Pages hold what they promise; tests/integration/testing/test_code_blocks.py runs their code."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.glossary import link_first_uses
from docs.hooks import WORDS_OF_A_PAGE, fill, words_of
from subscriber import errors
from subscriber.protocol.decoder import Decoder
from subscriber.protocol.frames import PrimaryKeepalive, XLogData, decode_status_update, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Commit, StreamCommit
from subscriber.subscription.management import status_json
from subscriber.transaction.changes import InsertChange
from tests.support.code_blocks import PAGES
from tests.unit.protocol.test_golden import read

ROOT = Path(__file__).parents[2]


def example(containing: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/own-connection.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return str(found)


@pytest.mark.parametrize("capture", ["proto1", "proto2-streaming"])
def test_the_core_follows_a_captured_stream(capture: str) -> None:
    namespace: dict[str, Any] = {}
    exec(example("def follow("), namespace)
    follow: Callable[..., None] = namespace["follow"]
    payloads = read(18, capture)
    decoder = Decoder()
    commits = [message for payload in payloads if isinstance(message := decoder.decode(payload), Commit | StreamCommit)]
    last = max(commit.end_lsn for commit in commits)
    frames = [encode_frame(XLogData(Lsn(0), Lsn(0), 0, payload)) for payload in payloads]
    beyond = Lsn(last + 64)
    frames.append(encode_frame(PrimaryKeepalive(end_lsn=beyond, send_time=0, reply_requested=False)))
    sent: list[bytes] = []
    stored: list[list[Any]] = []
    follow(frames, Lsn(1), sent.append, stored.append)
    assert len(stored) == len(commits)
    assert any(isinstance(change, InsertChange) for changes in stored for change in changes)
    status = decode_status_update(sent[-1])
    assert (status.write, status.flush, status.apply) == (beyond, beyond, beyond)


@pytest.mark.parametrize("name", ["README.md", "docs/howto/library.md", "docs/howto/own-connection.md"])
def test_python_examples_compile(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        compile("async def example():\n" + "".join(f"    {line}\n" for line in block.splitlines()), name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    """`make docs` checks the anchors, too, but not those of README."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_references_from_the_code_lead_somewhere() -> None:
    for file in [*ROOT.glob("subscriber/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("docker/*.yaml")]:
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text()):
            assert (ROOT / page).exists(), f"{file}: {page}"


def test_parts_that_pages_take_from_the_code_are_made() -> None:
    for page in ROOT.glob("docs/**/*.md"):
        assert "<!-- generated" not in fill(page.read_text()), page


def test_first_use_of_a_term_becomes_a_link() -> None:
    text = "# A sink\n\nSee `sink` and [a sink](x.md).\nSinks and a sink have a landing zone.\n"
    linked = "# A sink\n\nSee `sink` and [a sink](x.md).\n[Sinks](g.md#sink) and a sink have a [landing zone](g.md#landing-zone).\n"
    assert link_first_uses(text, "## Sink\n\n## Landing zone\n", "g.md") == linked


def test_no_page_is_long() -> None:
    """`make docs` counts the words of the rendered pages, docstrings included."""
    for page in PAGES:
        assert len(page.read_text().split()) <= WORDS_OF_A_PAGE, page


def test_words_of_code_are_counted_as_they_are_read() -> None:
    assert words_of('<p>Two words</p><p>here: <code><span class="n">self</span><span class="o">.</span><span>file</span></code></p>') == 4


def test_make_docs_sees_warnings() -> None:
    """`--quiet` hides them, and `--strict` counts only what is shown."""
    (command,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs build" in line]
    assert "--strict" in command
    assert "--quiet" not in command


def test_the_reference_has_all_errors_and_their_remedies() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    what_happens, remedies = page.split("## Classes")
    for name in errors.__all__:
        if name not in {"SubscriberError", "NeverPrepared"}:
            assert f"`{name}`" in what_happens
            assert f"`{name}`" in remedies


def test_the_reference_has_all_members_of_a_status() -> None:
    page = (ROOT / "docs/reference/status.md").read_text()
    for name in re.findall(r'^ +"(\w+)":', inspect.getsource(status_json), re.MULTILINE):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_code_is_in_fences_with_a_language(page: Path) -> None:
    """tests/integration/testing/test_code_blocks.py runs those."""
    fenced = False
    for number, (before, line) in enumerate(itertools.pairwise(["", *page.read_text().splitlines()]), start=1):
        if line.startswith("```"):
            fenced = not fenced
            assert re.fullmatch("```(python|sh|sql|text|mermaid|yaml|toml|ini)" if fenced else "```", line), f"{page.name}:{number}"
        assert fenced or before or not line.startswith("    "), f"{page.name}:{number} is an indented block"


def test_attacks_of_the_security_page_are_tests() -> None:
    text = (ROOT / "docs" / "explanation" / "security.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert len(named) > 4
    assert [name for name in named if not (ROOT / name).is_file()] == []
