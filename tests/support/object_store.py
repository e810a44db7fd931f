"""An object store: moto's S3, as a process. It does not show what is special to a real one (other latencies, other errors)."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest
from pyarrow import fs

from subscriber.testing.ports import LOOPBACK, free_port

_SECONDS = 90.0
_SERVER = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from moto.server import main
main(sys.argv[1:])
"""
"""It ends with the process that started it, however that ends."""


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """The URI of an empty bucket; the environment says to this process and its children where it is."""
    port = free_port()
    endpoint = f"http://{LOOPBACK}:{port}"
    command = [sys.executable, "-c", _SERVER, "-H", LOOPBACK, "-p", str(port)]
    with tempfile.TemporaryFile() as log, pytest.MonkeyPatch.context() as patch:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + _SECONDS
            while not _answers(port):
                assert process.poll() is None and time.monotonic() < deadline, "moto's server does not come up"  # noqa: PT018
                time.sleep(0.05)
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


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", "/moto-api/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
