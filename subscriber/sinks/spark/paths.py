"""Where tables lie in a lake, and paths as Spark wants them."""

from __future__ import annotations

import re
from typing import Final

from subscriber.abc import TableName

__all__ = ["table_directory", "without_patterns"]

_PLAIN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NUMBERED: Final = re.compile(r"-\d+\Z")
_PATTERN: Final = re.compile(r"[\[\]{}*?\\]")


def table_directory(root: str, name: TableName, table_id: int) -> str:
    """``root/schema/table``; names that a path or URL would have to quote are told apart by the table's number.

    So are those that end as if they had one: no two tables have the same directory.
    """
    if _PLAIN.fullmatch(name.namespace) and _PLAIN.fullmatch(name.name) and not _NUMBERED.search(name.name):
        return f"{root}/{name.namespace}/{name.name}"
    plain = [re.sub(r"[^A-Za-z0-9_-]", "_", part)[:60] or "_" for part in (name.namespace, name.name)]
    return f"{root}/{plain[0]}/{plain[1]}-{table_id}"


def without_patterns(path: str) -> str:
    """A path for Spark's readers, which would look for patterns in it."""
    return _PATTERN.sub(r"\\\g<0>", path)
