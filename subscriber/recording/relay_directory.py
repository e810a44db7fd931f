"""The directories of relay logs."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path

from subscriber.apply.receiving.spool import private_directory
from subscriber.errors import SpoolError
from subscriber.threads import run_in_thread

__all__ = ["directory_name", "discard_relay_log", "probe_relay_log"]


async def probe_relay_log(directory: str) -> None:
    """Check that a relay log can be created there.

    Raises:
        SpoolError: it cannot.
    """

    def work() -> None:
        base = Path(os.path.realpath(directory))
        for path in (base, base / secrets.token_hex(16)):
            private_directory(path, "relay log", "relay_log")
        path.rmdir()

    await run_in_thread(work)


def discard_relay_log(directory: str, key: str) -> None:
    """Remove the relay log of a subscription that is dropped, or that starts over. It must not be in use. It blocks.

    Raises:
        SpoolError: it cannot be removed.
    """
    path = Path(os.path.realpath(directory)) / directory_name(key)
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SpoolError(f'could not remove the relay log "{path}": {error.strerror}', hint="remove it yourself") from error


def directory_name(key: str) -> str:
    """The name of a subscription's directory."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
