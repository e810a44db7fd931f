"""``python -m tests.chaos.child …``: the program, which writes where all of its tasks are when it gets SIGUSR1."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys

from subscriber.cli.main import main


def _tell(*_: object) -> None:
    for task in asyncio.all_tasks(asyncio.get_running_loop()):
        print(f"--- task {task.get_name()}", file=sys.stderr)
        awaited: object = task.get_coro()
        while awaited is not None:
            code = getattr(awaited, "cr_code", None) or getattr(awaited, "ag_code", None)
            frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
            if code is not None and frame is not None:
                print(f"  {code.co_filename}:{frame.f_lineno} {code.co_qualname}", file=sys.stderr)
            awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    print("--- end", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _tell)
    # also where the event loop is blocked, and the handler above is not called
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    sys.exit(main(sys.argv[1:]))
