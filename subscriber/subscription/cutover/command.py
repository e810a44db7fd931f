"""Run a command of the user."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from subscriber.errors import ConfigurationError

__all__ = ["run_command"]


async def run_command(what: str, command: str, variables: dict[str, str], timeout: float) -> None:
    """Run a command with the shell. Its output goes to standard error.

    The command is killed with all its children at the end of the time, and if this task is cancelled.

    Raises:
        ConfigurationError: it failed, or took too long.
    """
    process = await asyncio.create_subprocess_shell(
        command, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr, env={**os.environ, **variables}, start_new_session=True
    )
    try:
        async with asyncio.timeout(timeout):
            status = await process.wait()
    except TimeoutError:
        raise ConfigurationError(
            f"the {what} command did not end within {timeout:g} s, and was killed", hint="correct the command, and try again"
        ) from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if status:
        ended = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
        raise ConfigurationError(f"the {what} command {ended}", hint="correct the command, and try again")
