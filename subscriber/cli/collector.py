"""Settings of the cyclic garbage collector for our own process. A library must not change them, because the process is not its own."""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["pause_collector", "settle_collector"]

_THRESHOLD: Final = 50_000


def pause_collector() -> None:
    """Let the collector rest until :func:`settle_collector`: what is imported stays, and a command imports for most of its time."""
    gc.disable()


def settle_collector() -> None:
    """Let the collector run less often, and never look at what is imported by now.

    Changes in progress are many objects that live as long as a batch, without cycles. By default the collector looks at them every 700
    objects, and finds nothing. Only errors leave cycles, and those are freed a little later.
    """
    gc.freeze()
    gc.set_threshold(_THRESHOLD, 20, 20)
    gc.enable()
