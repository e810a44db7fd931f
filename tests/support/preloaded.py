"""``python -m subscriber`` without the 0.4 seconds of its imports.

Each process of pytest has a server that has imported the program, and forks for each start. The child takes over arguments, environment,
working directory and streams, then runs the module as ``python -m`` does. It is a process of its own, which is signalled and ends as usual.
What a test may see of the start itself (time, imports, ``/proc/PID/cmdline``) needs the real command.
"""

# ruff: noqa: F401 -- it imports for those that it forks

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "TZ", "PSYCOPG")
"""Variables, or their first letters, that the interpreter and libraries read only once."""
_REQUEST_BYTES = 1 << 20

_starting = threading.Lock()
_servers: dict[tuple[tuple[str, str], ...], tuple[socket.socket, IO[bytes]]] = {}


def _server(environment: Mapping[str, str]) -> tuple[socket.socket, IO[bytes]]:
    """Where requests are sent, and its own output. Programs whose interpreters start differently have different servers."""
    key = tuple(sorted((name, value) for name, value in environment.items() if name.startswith(_READ_AT_START)))
    with _starting:
        if key not in _servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-W", "error", "-m", __name__, str(theirs.fileno())],
                    env=environment,
                    cwd=Path(__file__).parents[2],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,  # as those of its children: sys.stdout and sys.stderr are made once
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                )
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
            atexit.register(process.wait)
            atexit.register(ours.close)  # runs first, and ends the server
            assert process.stdout is not None
            _servers[key] = ours, process.stdout
        return _servers[key]


class PreloadedProgram:
    """A program that runs; used as ``subprocess.Popen`` is.

    Args:
        arguments: of the program.
        environment: all of its variables.
        output, problems: descriptors of its standard output and standard error, which stay the caller's.
        code: run instead of the module, as by ``python -c``.
        directory: its working directory, if that is another one.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        problems: int,
        *,
        code: str = "",
        directory: Path | None = None,
    ) -> None:
        place = os.getcwd() if directory is None else str(directory)
        request = {"arguments": arguments, "environment": dict(environment), "directory": place, "code": code}
        self._ended, ending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ending:
            control, self._said = _server(environment)
            socket.send_fds(control, [json.dumps(request).encode()], [output, problems, ending.fileno()])
        self.returncode: int | None = None
        self.pid = int(self._message())

    def _message(self) -> str:
        found = self._ended.recv(32).decode()
        assert found, f"the server of preloaded programs has ended: {self._said.read().decode()}"
        return found

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = int(self._message())
            self._ended.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("subscriber", timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PipedProgram(PreloadedProgram):
    """One whose output is read.

    Attributes:
        stdout, stderr: what it writes.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, errors: str = "strict", directory: Path | None = None
    ) -> None:
        output, output_end = os.pipe()
        problems, problems_end = os.pipe()
        self.stdout: IO[str] = os.fdopen(output, encoding="utf-8", errors=errors)
        self.stderr: IO[str] = os.fdopen(problems, encoding="utf-8", errors=errors)
        try:
            super().__init__(arguments, environment, output_end, problems_end, directory=directory)
        finally:
            os.close(output_end)
            os.close(problems_end)

    def close(self) -> None:
        """Forget it, once it has ended."""
        self.stdout.close()
        self.stderr.close()


def _serve(control: socket.socket) -> tuple[list[str], str]:
    """Fork for each request. Returns in the child, with the arguments and the code."""
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([control.fileno(), *running], [], [])[0]:
            if ready in running:  # one has ended
                pid, ending = running.pop(ready)
                _, status = os.waitpid(pid, 0)
                os.write(ending, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(ending)
                os.close(ready)
                continue
            request, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 3)
            if not request:
                sys.exit()
            output, problems, ending = descriptors
            pid = os.fork()
            if pid == 0:
                control.detach()
                return _become(json.loads(request), output, problems)
            os.close(output)
            os.close(problems)
            os.write(ending, str(pid).encode())
            running[os.pidfd_open(pid)] = pid, ending


def _become(request: dict[str, Any], output: int, problems: int) -> tuple[list[str], str]:
    """Take over what a started program gets. Returns the arguments and the code."""
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, problems)):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]
    return request["arguments"], request["code"]


def _run(code: str) -> int:
    """Run the program. Returns its exit status. What is raised otherwise is for the interpreter."""
    try:
        if code:
            exec(code, {"__name__": "__main__"})
        else:
            runpy.run_module("subscriber", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        raise
    return 0


def _end(status: int) -> None:
    """As the interpreter ends, but for freeing what was imported before the fork: that copies all of its memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()  # what was left open is said now
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has gone, or it was closed
            stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    # what verbs with the usual targets import
    import aiomysql  # type: ignore[import-untyped]
    import aiosqlite
    import asyncpg
    import sqlalchemy.dialects.mysql
    import sqlalchemy.dialects.sqlite

    import subscriber.cli.verbs
    import subscriber.sinks.postgres
    import subscriber.sinks.sqlalchemy

    for package in (subscriber.cli.verbs, subscriber.sinks.postgres, subscriber.sinks.sqlalchemy):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)

    gc.collect()
    gc.freeze()
    with contextlib.closing(socket.socket(fileno=int(sys.argv[1]))) as control:
        sys.argv[1:], given = _serve(control)
    _end(_run(given))
