"""``subscriber.testing.containers`` on Docker and on Podman."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from testcontainers.core.config import ConnectionMode, testcontainers_config
from testcontainers.core.labels import LABEL_SESSION_ID, SESSION_ID

import subscriber
from subscriber.sinks.memory import MemorySink, MemoryTarget
from subscriber.testing.containers import ContainerError, EngineUnavailable, PostgresContainers, postgres_container
from tests.docker.engine import apt_install, docker, run, wait_until
from tests.docker.images import VERSIONS, python_image


@pytest.fixture(autouse=True)
def _without_ryuk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its image is in a registry, which this machine may not reach."""
    monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)


def _replicates(containers: PostgresContainers, version: int) -> None:
    """A subscription starts at once, and its slot does not stay."""
    server = containers.get(version, {"work_mem": "7MB"})
    with server.database() as dsn:
        with psycopg.connect(dsn, autocommit=True) as publisher:
            assert publisher.execute("SELECT current_setting('work_mem'), current_setting('wal_level')").fetchone() == ("7MB", "logical")
            assert publisher.info.server_version // 10000 == version
            publisher.execute("CREATE TABLE accounts (id int PRIMARY KEY)")
            publisher.execute("INSERT INTO accounts VALUES (1)")
            publisher.execute("CREATE PUBLICATION app FOR TABLE accounts")
        target = MemoryTarget()
        asyncio.run(
            subscriber.Subscription("memory", connection=dsn, publications=["app"], target=MemorySink(target)).run(subscriber.Until())
        )
        assert target.rows("public.accounts") == [{"id": 1}]
    with psycopg.connect(server.dsn()) as session:
        assert session.execute("SELECT count(*) FROM pg_replication_slots").fetchone() == (0,)
        assert session.execute("SELECT count(*) FROM pg_database WHERE datname LIKE 'test%'").fetchone() == (0,)


def _number_of_containers() -> int:
    """Of this process; the machine may run others."""
    return len(docker("container", "ls", "--all", "--quiet", "--filter", f"label={LABEL_SESSION_ID}={SESSION_ID}").split())


def test_one_container_for_each_version_and_settings(standins: list[str]) -> None:
    before = _number_of_containers()
    with PostgresContainers() as containers:
        for version in (min(VERSIONS), max(VERSIONS)):
            _replicates(containers, version)
        assert containers.get(18, {"work_mem": "7MB"}) is containers.get(18, {"work_mem": "7MB"})
        assert _number_of_containers() == before + 2
    assert _number_of_containers() == before


def test_server_that_does_not_start_is_an_error_with_its_log(standins: list[str]) -> None:
    before = _number_of_containers()
    with pytest.raises(ContainerError, match="ended") as raised, postgres_container(18, {"wal_level": "nonsense"}):
        pass
    assert any('invalid value for parameter "wal_level"' in note for note in raised.value.__notes__)
    assert _number_of_containers() == before


@pytest.mark.parametrize(
    ("image", "hint"), [("subscriber.invalid/postgres:18", "check that the engine can pull this image"), (python_image(), "see the end")]
)
def test_image_that_cannot_run_is_an_error_that_names_it(standins: list[str], image: str, hint: str) -> None:
    before = _number_of_containers()
    with pytest.raises(ContainerError, match=f"could not start a container of {image}: .") as raised, postgres_container(image=image):
        pass
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(hint)
    assert _number_of_containers() == before


def test_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(EngineUnavailable, match="no container engine answers"), postgres_container():
        pass


def test_sockets_of_other_users_are_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only root may look into /run/podman, and DOCKER_HOST may name such a directory, too."""
    directory = tmp_path / "other"
    directory.mkdir(mode=0)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{directory}/docker.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    with _no_root(), pytest.raises(EngineUnavailable, match="no container engine answers"), postgres_container():
        pass


@contextlib.contextmanager
def _no_root() -> Iterator[None]:
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def podman(standins: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Podman's service, with storage of its own and the image of 18. It is where the service of a user would be."""
    # Podman rejects longer paths than this one
    with tempfile.TemporaryDirectory(prefix="podman-", dir="/var/tmp") as directory, _podman(Path(directory), monkeypatch):
        yield


@contextlib.contextmanager
def _podman(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if shutil.which("podman") is None:
        if os.geteuid() != 0:
            pytest.skip("Podman is not installed")
        apt_install("podman", "runc")
    # Podman 4.3 asks for more open files than this machine may allow
    (directory / "containers.conf").write_text('[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n')
    monkeypatch.setenv("CONTAINERS_CONF", str(directory / "containers.conf"))
    # testcontainers takes a machine with /.dockerenv for a container, and then needs what Podman 4.3 does not tell
    monkeypatch.setattr(testcontainers_config, "connection_mode_override", ConnectionMode.docker_host)
    words = ["podman", "--root", str(directory / "storage"), "--runroot", str(directory / "run"), "--tmpdir", str(directory / "tmp")]
    words += ["--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "file"]
    docker("save", "--output", directory / "image.tar", "postgres:18-bookworm")
    run(*words, "load", "--input", directory / "image.tar")
    run(*words, "tag", "localhost/postgres:18-bookworm", "docker.io/library/postgres:18-bookworm")
    (directory / "image.tar").unlink()
    socket = directory / "podman" / "podman.sock"
    socket.parent.mkdir()
    with (directory / "log").open("wb") as log:
        service = subprocess.Popen(
            [*words, "system", "service", "--time", "0", f"unix://{socket}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        wait_until(socket.exists, lambda: "the socket of Podman is not there")
        monkeypatch.setenv("DOCKER_HOST", f"unix://{directory}/no.sock")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
        yield
    finally:
        service.terminate()
        service.wait(60)
        run(*words, "system", "reset", "--force", check=False)


@pytest.mark.usefixtures("podman")
def test_podman() -> None:
    with PostgresContainers() as containers:
        _replicates(containers, 18)
