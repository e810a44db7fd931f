"""One container of our image: what it may do, its health, and full volumes."""

from __future__ import annotations

import json
import re

import psycopg

import subscriber
from tests.docker.engine import docker, inspect
from tests.docker.images import python_image
from tests.docker.replicas import VOLUME, Replica, wait_for_server
from tests.docker.stack import TARGET_PASSWORD, Container, Stack

_PRIVILEGES = """
import json, os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
written = []
for directory in ("/", "/opt/subscriber", "/etc", "/tmp", "/var/tmp", os.environ["TMPDIR"]):
    try:
        open(os.path.join(directory, "probe"), "w").close()
        written.append(directory)
        os.remove(os.path.join(directory, "probe"))
    except OSError:
        pass
print(json.dumps({"uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups(), "effective": status["CapEff"],
    "bounding": status["CapBnd"], "no_new_privileges": status["NoNewPrivs"], "written": written}))
"""
_PROCESS = """
import os, signal
for name in filter(str.isdigit, os.listdir("/proc")):
    words = open(f"/proc/{name}/cmdline", "rb").read().split(b"\\0")
    if b"run" in words and any(word.endswith(b"/subscriber") for word in words[:2]) and b"python" in words[0]:
        os.kill(int(name), signal.%s)
        print(name)
"""


def test_container_has_no_privileges_and_writes_to_its_volume_only(stack: Stack) -> None:
    found = json.loads(stack.service("subscription18").python(_PRIVILEGES))
    assert found == {
        "uid": 10001,
        "gid": 10001,
        "groups": [10001],
        "effective": "0" * 16,
        "bounding": "0" * 16,
        "no_new_privileges": "1",
        "written": [VOLUME],
    }


def test_image_has_labels_and_the_compiled_core_and_nothing_that_installs(image: str) -> None:
    found = inspect("image", image)["Config"]
    assert found["User"] == "10001:10001"
    assert found["Labels"]["org.opencontainers.image.version"] == subscriber.__version__
    assert re.fullmatch(r"[0-9a-f]{40}", found["Labels"]["org.opencontainers.image.revision"])
    assert docker("run", "--rm", image, "--version").strip() == f"subscriber {subscriber.__version__} (c)"
    programs = docker("run", "--rm", "--entrypoint", "sh", image, "-c", "ls /opt/subscriber/bin; command -v gcc || true").split()
    assert "subscriber" in programs
    assert not [name for name in programs if name.startswith("pip") or name.endswith("gcc")]
    # what is ours of the size; the rest is the base image
    ours = inspect("image", image)["Size"] - inspect("image", python_image())["Size"]
    assert ours < 200_000_000


def test_health_follows_the_slot(stack: Stack) -> None:
    container = stack.service("subscription18")
    container.wait_for_health("healthy")
    with psycopg.connect(stack.publisher_dsn(18), autocommit=True) as publisher:
        # a process that is stopped answers no keepalive
        publisher.execute("ALTER SYSTEM SET wal_sender_timeout = '2s'")
        publisher.execute("SELECT pg_reload_conf()")
        try:
            assert container.python(_PROCESS % "SIGSTOP")
            assert container.wait_for_health("unhealthy") == 'replication slot "from18" is not active'
            assert container.python(_PROCESS % "SIGCONT")
            assert container.wait_for_health("healthy") == ""
        finally:
            publisher.execute("ALTER SYSTEM RESET wal_sender_timeout")
            publisher.execute("SELECT pg_reload_conf()")
    stack.assert_equal(18)


def _small_volume(stack: Stack, size: str, owner: int) -> str:
    options = f"o=size={size},uid={owner},gid={owner},mode=0700"
    return stack.volume("--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", options)


def _large_transaction(stack: Stack) -> None:
    with psycopg.connect(stack.publisher_dsn(18)) as publisher:
        publisher.execute("INSERT INTO transfers (from_account, to_account, amount) SELECT 1, 2, n FROM generate_series(1, 30000) n")


def test_full_spool_volume_stops_with_one_message_and_loses_nothing(stack: Stack, replica: Replica) -> None:
    replica.arguments = ["-o", "streaming=on", "-c", "logical_decoding_work_mem=64kB"]
    container = replica.start("--volume", f"{_small_volume(stack, '1m', 10001)}:{VOLUME}")
    container.wait_for_health("healthy")
    _large_transaction(stack)
    container.wait_for_log("No space left on device")
    _assert_one_message(container, "No space left on device", "make room in")
    container.wait_for_health("unhealthy")
    container.remove()
    replica.start("--volume", f"{_small_volume(stack, '64m', 10001)}:{VOLUME}").wait_for_health("healthy")
    replica.assert_equal()


def test_full_disk_of_the_target_is_reported_and_waited_for(stack: Stack, replica: Replica) -> None:
    """A target whose table is on a small disk: the subscription continues as soon as there is room."""
    with psycopg.connect(stack.publisher_dsn(18)) as publisher:
        row = publisher.execute("SELECT pg_relation_size('transfers') + 2 * 1024 * 1024").fetchone()
    assert row is not None
    disk = ("--tmpfs", f"/small:size={row[0]}")
    server = stack.run("--env", f"POSTGRES_PASSWORD={TARGET_PASSWORD}", "--network-alias", "small", *disk, "postgres:18-bookworm")
    psql = ("psql", "-U", "postgres", "-v", "ON_ERROR_STOP=1", "-c")
    wait_for_server(server)
    server.exec("chown", "postgres", "/small")
    server.exec(*psql, "CREATE TABLESPACE small LOCATION '/small'")
    for table in (
        "accounts (id bigint PRIMARY KEY, owner text NOT NULL, balance numeric(12, 2) NOT NULL)",
        "transfers (id bigint PRIMARY KEY USING INDEX TABLESPACE pg_default, from_account bigint, to_account bigint, amount numeric(12, 2),"
        " made_at timestamptz) TABLESPACE small",
    ):
        server.exec(*psql, f"CREATE TABLE {table}")
    replica.target = "postgresql://postgres@small/postgres"
    container = replica.start()
    container.wait_for_health("healthy")
    with psycopg.connect(stack.publisher_dsn(18), autocommit=True) as publisher:
        for _ in range(3):
            _large_transaction(stack)
        container.wait_for_log("No space left on device")
        _assert_one_message(container, "No space left on device")
        server.exec(*psql, "ALTER TABLE transfers SET TABLESPACE pg_default")
        stack.wait_for_all(18, slot=replica.name)
        container.wait_for_health("healthy")
        row = publisher.execute("SELECT count(*), sum(id), sum(amount) FROM transfers").fetchone()
    assert row is not None
    assert server.exec(*psql, "SELECT count(*), sum(id), sum(amount) FROM transfers", "-At").strip() == "|".join(map(str, row))


def _assert_one_message(container: Container, *texts: str) -> None:
    """The first line of the log that holds the first text holds all, and there is no traceback."""
    lines = [line for line in container.logs.splitlines() if texts[0] in line]
    assert lines
    assert all(text in lines[0] for text in texts), lines[0]
    assert "Traceback" not in container.logs
