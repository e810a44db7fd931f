"""The code blocks of README and docs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: its path in the repository.
        line: of the fence.
        language: sh, sql, python, text, ...
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """Of a shell block: the words of each command. Those of a pipe are one."""
        joined = re.sub(r"(\||&&)\n", r"\1 ", self.text.replace("\\\n", " "))
        for line in joined.splitlines():
            for command in re.split(r"&&", line):
                if words := shlex.split(command, comments=True):
                    yield words


def blocks() -> list[Block]:
    """All of them."""
    return [
        Block(str(page.relative_to(ROOT)), text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for page in PAGES
        for text in [page.read_text()]
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]
