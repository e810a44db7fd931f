r"""``application_name`` of a subscription's sessions, other than the one that streams from the slot.

The session that streams from the slot bears the subscription's name alone. A server keeps the first 63 bytes of ``application_name``, and
replaces bytes that are not printable ASCII (by ``?``, from PostgreSQL 16 on by ``\xHH``). A subscription's name may have 63 bytes itself.
A suffix would then be cut off, and the session would look like the one that streams. Names that differ only at their ends would look equal.

Source: PostgreSQL manual, 19.8.3 (application_name).
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

__all__ = ["session_marks", "session_name"]

_BYTES: Final = 63
_KEPT: Final = re.compile(r"[ -~]*", re.ASCII)


def session_name(name: str, role: str) -> str:
    """Return a name for a session that has ``role`` for a subscription (or slot). No server changes it.

    Returns:
        The name and the role, with a blank between them. If the server would not keep that, the start of the name and a hash of eight
        digits stand for the name. The role is always at the end.
    """
    whole = f"{name} {role}"
    if len(whole) <= _BYTES and _KEPT.fullmatch(whole):
        return whole
    end = f"{_hash(name)}{role}"
    return re.sub(r"[^ -~]", "?", name)[: _BYTES - len(end)] + end


def session_marks(name: str) -> tuple[str, str]:
    """Return how the names of :func:`session_name` begin that keep the name, and what is inside all others."""
    return f"{name} ", _hash(name)


def _hash(name: str) -> str:
    return f"~{hashlib.blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=4).hexdigest()} "
