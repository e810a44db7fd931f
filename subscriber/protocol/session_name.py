r"""Names of the sessions beside the one that follows the slot (``application_name``).

A server keeps the first 63 bytes of such a name, and shows bytes that are not printable ASCII in another form (``?``, from PostgreSQL 16 on
``\xHH``). A subscription's name may have 63 bytes itself, so a word behind it would be cut off, and its session be taken for the one that
follows the slot, which bears the subscription's name alone; and names that differ only at their ends could not be told apart.

Source: PostgreSQL manual, 19.8.3 (application_name).
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

__all__ = ["session_name"]

_BYTES: Final = 63
_KEPT: Final = re.compile(r"[ -~]*", re.ASCII)


def session_name(name: str, role: str) -> str:
    """What a session that does ``role`` for a subscription (or slot) of this name is called: one that no server changes.

    Returns:
        Both, with a blank between them; if that is not kept as it is, the beginning of the name and eight digits that stand for
        all of it. The role is always at the end.
    """
    whole = f"{name} {role}"
    if len(whole) <= _BYTES and _KEPT.fullmatch(whole):
        return whole
    digits = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    end = f"~{digits} {role}"
    return re.sub(r"[^ -~]", "?", name)[: _BYTES - len(end)] + end
