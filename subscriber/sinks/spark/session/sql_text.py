"""Names and texts in statements of Spark SQL."""

from __future__ import annotations

__all__ = ["quoted_name", "quoted_text"]


def quoted_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def quoted_text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
