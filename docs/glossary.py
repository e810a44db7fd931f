"""Links from the first use of a term on a page to the glossary."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["link_first_uses", "terms"]

_HEADING: Final = re.compile(r"^## (.+)$", re.MULTILINE)
_UNTOUCHED: Final = re.compile(r"^```.*?^```$|^(?:#|\||:::|<)[^\n]*$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|<[^>\n]*>", re.MULTILINE | re.DOTALL)
"""Fenced code, headings, tables, references to docstrings, HTML; code and links within a line."""


def terms(glossary: str) -> dict[str, str]:
    """Each term of the glossary, with the anchor of its heading."""
    return {term: re.sub(r"[^\w\s-]", "", term).strip().lower().replace(" ", "-") for term in _HEADING.findall(glossary)}


def link_first_uses(markdown: str, glossary: str, address: str) -> str:
    """Make a link of the first use of each term, singular or plural.

    Args:
        markdown: of the page.
        glossary: the text of the glossary.
        address: of the glossary, relative to the page.
    """
    anchors = {term.lower(): anchor for term, anchor in terms(glossary).items()}
    # the longest first: "landing zone" is not "landing"
    alternatives = "|".join(re.escape(term) for term in sorted(anchors, key=len, reverse=True))
    use = re.compile(rf"(?<![\w-])({alternatives})(s|es)?(?![\w-])", re.IGNORECASE)

    def linked(match: re.Match[str]) -> str:
        anchor = anchors.pop(match[1].lower(), None)
        return match[0] if anchor is None else f"[{match[0]}]({address}#{anchor})"

    parts, end = [], 0
    for untouched in _UNTOUCHED.finditer(markdown):
        parts += [use.sub(linked, markdown[end : untouched.start()]), untouched[0]]
        end = untouched.end()
    return "".join([*parts, use.sub(linked, markdown[end:])])
