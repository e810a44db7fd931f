"""The cyclic garbage collector in a process of our own. A library leaves it alone: the process is somebody else's."""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["settle_collector"]

_THRESHOLD: Final = 50_000


def settle_collector() -> None:
    """Let it look less often, and never at what is imported by now.

    Changes on their way are many objects, alive for as long as a batch, in no cycles: by default it looks at them every 700, and finds
    nothing. Cycles are left by errors alone, and wait a little longer.
    """
    gc.freeze()
    gc.set_threshold(_THRESHOLD, 20, 20)
