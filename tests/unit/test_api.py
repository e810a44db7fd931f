"""Public is what is documented, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import subscriber

PAGES = Path(__file__).parents[2] / "docs" / "reference" / "python"


def test_all_that_is_exported_has_one_place_in_the_reference() -> None:
    documented = [name for page in PAGES.glob("*.md") for name in re.findall(r"^::: subscriber\.(\w+)$", page.read_text(), re.MULTILINE)]
    assert sorted([*documented, "__version__"]) == sorted(subscriber.__all__)


def test_the_index_names_each_page_with_what_is_on_it() -> None:
    rows = re.findall(r"^\| \[.*?\]\((\w+\.md)\) \| (.*) \|$", (PAGES / "index.md").read_text(), re.MULTILINE)
    for page, names in rows:
        assert set(re.findall(r"`(\w+)`", names)) == set(
            re.findall(r"^::: subscriber\.(\w+)$", (PAGES / page).read_text(), re.MULTILINE)
        ), page
    assert len(rows) >= 6


def test_all_that_is_exported_is_there_and_describes_itself() -> None:
    assert len(set(subscriber.__all__)) == len(subscriber.__all__)
    for name in subscriber.__all__:
        found = getattr(subscriber, name)
        if isinstance(found, type) or callable(found):
            assert found.__doc__, name


def test_nothing_else_looks_public() -> None:
    rooms = {
        "batch_times",
        "interfaces",
        "log_fields",
        "rate_limit",
        "redaction",
        "apply",
        "catalog",
        "cli",
        "config",
        "consumer",
        "context_values",
        "crash_points",
        "errors",
        "plugins",
        "printable",
        "protocol",
        "rowfilter",
        "recording",
        "repeated_errors",
        "schema",
        "sinks",
        "spark",
        "stream_session",
        "subscription",
        "testing",
        "threads",
        "transaction",
        "types",
        "verification",
        "waits",
        "walreceiver",
    }
    # pytest rewrites the assertions of a package that has a plugin, and adds names with @
    found = {name for name in dir(subscriber) if not name.startswith(("_", "@"))}
    assert found - rooms == {name for name in subscriber.__all__ if not name.startswith("_")}
