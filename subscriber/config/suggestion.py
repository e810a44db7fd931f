"""The hint of an error about an unknown name: the known one that it resembles, else all of them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["suggestion"]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean "…"?``, or a list of the known names."""
    from difflib import get_close_matches  # noqa: PLC0415 -- only an error needs it

    names = sorted(known)
    close = get_close_matches(name.lower(), names, n=1)
    return f'did you mean "{close[0]}"?' if close else f"one of {', '.join(names)}"
