"""The code in docs/api.md does what the page says."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subscriber.protocol.decoder import Decoder
from subscriber.protocol.frames import PrimaryKeepalive, XLogData, decode_status_update, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Commit, StreamCommit
from subscriber.transaction.changes import InsertChange
from tests.code_blocks import PAGES
from tests.unit.protocol.test_golden import read

ROOT = Path(__file__).parents[2]


def example(containing: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)
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


@pytest.mark.parametrize("name", ["README.md", "docs/api.md"])
def test_python_examples_compile(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        compile("async def example():\n" + "".join(f"    {line}\n" for line in block.splitlines()), name, "exec")


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]))
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_code_is_in_fences_with_a_language(page: Path) -> None:
    """tests/integration/test_code_blocks.py runs those."""
    fenced = False
    for number, (before, line) in enumerate(itertools.pairwise(["", *page.read_text().splitlines()]), start=1):
        if line.startswith("```"):
            fenced = not fenced
            assert re.fullmatch("```(python|sh|sql|text)" if fenced else "```", line), f"{page.name}:{number}"
        assert fenced or before or not line.startswith("    "), f"{page.name}:{number} is an indented block"
