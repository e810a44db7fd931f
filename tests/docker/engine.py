"""A Docker engine, and Docker Compose v2: those of the machine, or installed and started here.

Without an engine, root installs Debian's ``docker.io`` and starts ``dockerd`` with its data in /var/lib/docker. It is stopped at
the end by its process id. Without Compose v2 the Go toolchain builds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build" / "docker"
COMPOSE_VERSION: Final = "v2.40.3"
PROJECT: Final = f"subscriber-test-{secrets.token_hex(4)}"
LABEL: Final = f"subscriber.test={PROJECT}"
"""Of everything that this run makes and Compose does not."""
_PACKAGES: Final = ("docker.io", "iptables")
_CLIENT: Final = "docker-cli"
"""From Debian 13 on, the client has a package of its own."""
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


def wait_until(holds: Callable[[], bool], what: Callable[[], str], seconds: float = 300) -> None:
    """Ask again until it holds. Containers have no event that a client could wait for instead.

    Args:
        holds: what is waited for.
        what: why it failed.
        seconds: then it failed.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {seconds:g} s: {what()}"
        time.sleep(0.2)


def apt_install(*packages: str, optional: Sequence[str] = ()) -> None:
    """Install Debian packages, and the optional ones that this release has."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise EngineError(f"only root can install {' '.join(packages)}, on Debian")
    run("apt-get", "update", timeout=600)
    found = [name for name in optional if name in run("apt-cache", "pkgnames", name).split()]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "install", "--yes", "--no-install-recommends", *packages, *found, timeout=1200, env=environment)


def install_engine() -> None:
    """Install Debian's engine and its client."""
    apt_install(*_PACKAGES, optional=[_CLIENT])


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """An engine that answers. The value describes it."""
    with contextlib.ExitStack() as stack:
        if not _answers():
            if os.geteuid() != 0:
                raise EngineError("no Docker engine answers, and only root can install and start one: start Docker, or set DOCKER_HOST")
            if shutil.which("dockerd") is None or shutil.which("docker") is None:
                install_engine()
            # systemd starts what apt installs
            if not _answers():
                stack.enter_context(_daemon())
        # the client of newer versions needs a plugin for the builder that replaced this one
        if not _works("docker", "buildx", "version"):
            os.environ["DOCKER_BUILDKIT"] = "0"
        yield docker("version", "--format", "Docker {{.Server.Version}}").strip()
        left = _left()
        for kind, identity in left:
            docker(kind, "rm", "--force", identity, check=False)
        assert not left, f"tests left behind: {left}"


def _works(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False, timeout=30).returncode == 0
    except OSError:
        return False


def _answers() -> bool:
    return _works("docker", "version", "--format", "{{.Server.Version}}")


def _left() -> list[tuple[str, str]]:
    """What this run made and did not remove, containers first."""
    lists = {"container": ("--all", "--no-trunc"), "network": ("--no-trunc",), "volume": ()}
    return [
        (kind, identity)
        for kind, options in lists.items()
        for label in (LABEL, f"com.docker.compose.project={PROJECT}", f"com.docker.compose.project={PROJECT}-spark")
        for identity in docker(kind, "ls", "--quiet", "--filter", f"label={label}", *options).split()
    ]


@contextlib.contextmanager
def _daemon() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="subscriber-dockerd-", dir="/run") as name:
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
            # a container in the network of the machine leaves a mount
            for line in Path("/proc/self/mounts").read_text().splitlines():
                if (point := line.split()[1]).startswith(f"{directory}/"):
                    run("umount", point)
            if before is None:
                del os.environ["DOCKER_HOST"]
            else:
                os.environ["DOCKER_HOST"] = before


def compose_command() -> list[str]:
    """The words that start Docker Compose v2."""
    if _works("docker", "compose", "version"):
        return ["docker", "compose"]
    # not `go install`: it rejects modules whose go.mod excludes versions
    return [str(go_program("docker-compose", "github.com/docker/compose/v2", COMPOSE_VERSION, "cmd"))]


def go_program(name: str, module: str, version: str, package: str) -> Path:
    """A program that the Go toolchain builds from a published module, once, into ``build/docker``."""
    program = BUILD / f"{name}-{version}"
    if not program.exists():
        if shutil.which("go") is None:
            raise EngineError(f"{name} is missing: install it, or Go, which builds it")
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="subscriber-go-") as directory:
            Path(directory, "go.mod").write_text(f"module build\n\ngo 1.24\n\nrequire {module} {version}\n")
            Path(directory, "tools.go").write_text(f'package tools\n\nimport _ "{module}/{package}"\n')
            words = ["go", "build", "-C", directory, "-mod=mod", "-o", f"{program}.new", f"{module}/{package}"]
            run(*words, timeout=1800)
        Path(f"{program}.new").rename(program)
    return program
