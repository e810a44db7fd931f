"""A Docker engine, and Docker Compose v2: those of the machine, or installed and started here.

Without an engine that answers, root installs Debian's ``docker.io`` and starts ``dockerd`` with its data in /var/lib/docker. It is stopped at the
end by its process id. Without Compose v2 the Go toolchain builds it from its published module, once, into ``build/docker``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build" / "docker"
COMPOSE_VERSION: Final = "v2.40.3"
_PACKAGES: Final = ("docker.io", "iptables")
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 60.0


class EngineError(Exception):
    """There is no engine, and none can be started here."""


def docker(*words: str | Path, timeout: float = 300, check: bool = True, merge: bool = False) -> str:
    """Run the Docker client and return what it prints."""
    return run("docker", *words, timeout=timeout, check=check, merge=merge)


def run(*words: str | Path, timeout: float = 300, check: bool = True, merge: bool = False, env: dict[str, str] | None = None) -> str:
    """Run a program and return what it prints: its standard output, or both outputs."""
    done = subprocess.run(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merge else subprocess.PIPE,
        check=False,
        timeout=timeout,
        env=env,
        text=True,
        errors="replace",
    )
    if check and done.returncode:
        raise AssertionError(f"{' '.join(map(str, words))}: status {done.returncode}\n{done.stdout}\n{done.stderr or ''}")
    return done.stdout


def inspect(kind: str, name: str) -> dict[str, Any]:
    """What the engine knows of a container, image, network or volume."""
    (found,) = json.loads(docker(kind, "inspect", name))
    assert isinstance(found, dict)
    return found


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 120) -> None:
    """Ask again until it holds. Containers have no event that a client could wait for instead."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {seconds:g} s: {what}"
        time.sleep(0.2)


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """An engine that answers. The value describes it."""
    with contextlib.ExitStack() as stack:
        if not _answers():
            if os.geteuid() != 0:
                raise EngineError("no Docker engine answers, and only root can install and start one: start Docker, or set DOCKER_HOST")
            if shutil.which("dockerd") is None:
                run("apt-get", "update")
                run("apt-get", "install", "--yes", "--no-install-recommends", *_PACKAGES, timeout=600)
            stack.enter_context(_daemon())
        # the client of newer versions needs a plugin for the builder that replaced this one
        if not _works("docker", "buildx", "version"):
            os.environ["DOCKER_BUILDKIT"] = "0"
        before = _everything()
        yield docker("version", "--format", "{{.Server.Platform.Name}} {{.Server.Version}}").strip() or "Docker"
        left = _everything() - before
        for kind, identity in sorted(left):
            docker(kind, "rm", "--force", identity, check=False)
        assert not left, f"tests left behind: {sorted(left)}"


def _works(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False, timeout=30).returncode == 0
    except OSError:
        return False


def _answers() -> bool:
    return _works("docker", "version", "--format", "{{.Server.Version}}")


def _everything() -> set[tuple[str, str]]:
    """All containers, networks and volumes."""
    listed = {
        "container": docker("container", "ls", "--all", "--quiet", "--no-trunc"),
        "network": docker("network", "ls", "--quiet", "--no-trunc"),
        "volume": docker("volume", "ls", "--quiet"),
    }
    return {(kind, identity) for kind, text in listed.items() for identity in text.split()}


@contextlib.contextmanager
def _daemon() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="subscriber-dockerd-") as name:
        directory = Path(name)
        words = ["dockerd", "--data-root", "/var/lib/docker", "--exec-root", directory / "exec", "--pidfile", directory / "dockerd.pid"]
        socket = f"unix://{directory / 'docker.sock'}"
        with (directory / "log").open("wb") as log:
            daemon = subprocess.Popen([*map(str, words), "--host", socket], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = socket
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _answers():
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise EngineError(f"dockerd did not start:\n{(directory / 'log').read_text()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            daemon.terminate()
            try:
                daemon.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            if before is None:
                del os.environ["DOCKER_HOST"]
            else:
                os.environ["DOCKER_HOST"] = before


def compose_command() -> list[str]:
    """The words that start Docker Compose v2."""
    if _works("docker", "compose", "version"):
        return ["docker", "compose"]
    program = BUILD / f"docker-compose-{COMPOSE_VERSION}"
    if not program.exists():
        if shutil.which("go") is None:
            raise EngineError("Docker Compose v2 is missing: install it, or Go, which builds it")
        # not `go install`: it rejects modules whose go.mod excludes versions
        with tempfile.TemporaryDirectory(prefix="subscriber-compose-") as name:
            Path(name, "go.mod").write_text(f"module build\n\ngo 1.24\n\nrequire github.com/docker/compose/v2 {COMPOSE_VERSION}\n")
            Path(name, "tools.go").write_text('package tools\n\nimport _ "github.com/docker/compose/v2/cmd/compose"\n')
            words = ["go", "build", "-C", name, "-mod=mod", "-o", f"{program}.new", "github.com/docker/compose/v2/cmd"]
            BUILD.mkdir(parents=True, exist_ok=True)
            run(*words, timeout=1800)
        Path(f"{program}.new").rename(program)
    return [str(program)]
