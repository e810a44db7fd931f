"""Public is what is documented, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import subscriber

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"


def documented() -> list[str]:
    """Every name in backticks below ``## Names``, up to the next heading."""
    section = DOCUMENT.read_text().split("\n## Names\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"`([A-Za-z_]\w*)`", section)


def test_all_that_is_exported_is_documented_once() -> None:
    assert sorted(documented()) == sorted(subscriber.__all__)


def test_all_that_is_exported_is_there_and_describes_itself() -> None:
    assert len(set(subscriber.__all__)) == len(subscriber.__all__)
    for name in subscriber.__all__:
        found = getattr(subscriber, name)
        if isinstance(found, type) or callable(found):
            assert found.__doc__, name


def test_nothing_else_looks_public() -> None:
    rooms = {
        "abc",
        "apply",
        "catalog",
        "cli",
        "config",
        "errors",
        "printable",
        "protocol",
        "sinks",
        "spark",
        "subscription",
        "testing",
        "transaction",
        "types",
        "waits",
        "walreceiver",
    }
    found = {name for name in vars(subscriber) if not name.startswith("_")}
    assert found - rooms == {name for name in subscriber.__all__ if not name.startswith("_")}
