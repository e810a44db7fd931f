"""An object store: moto's S3, as a process. It does not show what is special to a real one (other latencies, other errors).

moto keeps objects in memory, so a test cannot kill it. It kills a gate instead: a process that forwards the connections.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from pyarrow import fs

from subscriber.testing.ports import LOOPBACK, free_port

_SECONDS = 90.0
_END_WITH_PARENT = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
"""
_SERVER = f"""{_END_WITH_PARENT}
from moto.server import main
main(sys.argv[1:])
"""
_GATE = f"""{_END_WITH_PARENT}
import asyncio, contextlib

async def forward(reader, writer):
    with contextlib.suppress(OSError), contextlib.closing(writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

async def connected(reader, writer):
    store_reader, store_writer = await asyncio.open_connection("{LOOPBACK}", int(sys.argv[2]))
    await asyncio.gather(forward(reader, store_writer), forward(store_reader, writer))

async def main():
    server = await asyncio.start_server(connected, "{LOOPBACK}", int(sys.argv[1]))
    await server.serve_forever()

asyncio.run(main())
"""


class Gate:
    """Forwards connections to the object store. If it is killed, requests in progress end anywhere; some take effect without an answer.

    Attributes:
        endpoint: for programs that use it.
    """

    def __init__(self) -> None:
        self._port, self._store = free_port(), urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
        self.endpoint = f"http://{LOOPBACK}:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", _GATE, str(self._port), str(self._store)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        _wait_for(self._process, self._port)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """The URI of an empty bucket; the environment says to this process and its children where it is."""
    port = free_port()
    endpoint = f"http://{LOOPBACK}:{port}"
    command = [sys.executable, "-c", _SERVER, "-H", LOOPBACK, "-p", str(port)]
    with tempfile.TemporaryFile() as log, pytest.MonkeyPatch.context() as patch:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            _wait_for(process, port)
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            environment = {
                "NO_PROXY": LOOPBACK,
                "no_proxy": LOOPBACK,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_REGION": "us-east-1",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ALLOW_HTTP": "true",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            for name, value in environment.items():
                patch.setenv(name, value)
            fs.S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True).create_dir("lakes")
            yield "s3://lakes"
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of an object store that runs for the tests of a module."""
    with object_store() as uri:
        yield uri


@pytest.fixture
def lake(bucket: str) -> str:
    """The URI of a lake in it that does not exist yet."""
    return f"{bucket}/{secrets.token_hex(5)}"


@contextlib.contextmanager
def denied() -> Iterator[None]:
    """The object store denies all requests in the block: it does not know the key of this process."""
    store = urlsplit(os.environ["AWS_ENDPOINT_URL"])

    def allow(requests: str) -> None:
        connection = http.client.HTTPConnection(LOOPBACK, store.port, timeout=5)
        with contextlib.closing(connection):
            connection.request("POST", "/moto-api/reset-auth", body=requests)
            assert connection.getresponse().status == 200

    allow("0")
    try:
        yield
    finally:
        allow("inf")


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while not _answers(port):
        assert process.poll() is None and time.monotonic() < deadline, "moto's server does not come up"  # noqa: PT018
        time.sleep(0.05)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", "/moto-api/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
