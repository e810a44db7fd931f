"""What `make docs` does beside rendering: generated parts, links to the glossary, the limit of words.

A line ``<!-- generated: NAME ARGUMENT … -->`` of a page is replaced by what the function of that name in ``docs/generated.py`` returns.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs import generated
from docs.glossary import link_first_uses

WORDS_OF_A_PAGE: Final = 1500
GLOSSARY: Final = "glossary.md"

_log = logging.getLogger("mkdocs.plugins.subscriber")
_MARKER: Final = re.compile(r"^<!-- generated: (\w+) ?(.*?) -->$", re.MULTILINE)
_SPAN: Final = re.compile(r"</?span\b[^>]*>")
_TAG: Final = re.compile(r"<[^>]*>")
_ROLE: Final = re.compile(r":(?:class|meth|func|data|mod|attr|exc):(?=<code>)")


def fill(markdown: str) -> str:
    """Replace the markers."""
    return _MARKER.sub(lambda marker: generated.PARTS[marker[1]](*marker[2].split()), markdown)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Before it is rendered."""
    filled = fill(markdown)
    if page.file.src_uri == GLOSSARY:
        return filled
    terms = (Path(config["docs_dir"]) / GLOSSARY).read_text()
    return link_first_uses(filled, terms, posixpath.relpath(GLOSSARY, posixpath.dirname(page.file.src_uri)))


def words_of(html: str) -> int:
    """How many words a page has. The spans that color code divide none."""
    return len(_TAG.sub(" ", _SPAN.sub("", html)).split())


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """As it was rendered."""
    words = words_of(html)
    if words > WORDS_OF_A_PAGE:
        _log.warning("%s has %d words: more than %d", page.file.src_uri, words, WORDS_OF_A_PAGE)
    else:
        _log.debug("%5d words: %s", words, page.file.src_uri)
    # docstrings are written for Sphinx
    return _ROLE.sub("", html).replace("::</p>", ":</p>")
