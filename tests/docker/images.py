"""The images of the tests: the base images that docker/ names, and our own from docker/Dockerfile.

A base image that the engine has is used as it is, so ``docker pull`` first runs the tests on official images. Where one is missing, a
stand-in takes its tag until the end of the run: a minimal Debian 13 by debootstrap, with Debian's CPython, or with a server that the other
tests use, too. docs/development/docker-checks.md says how they differ from the official images. Stand-ins stay under names of their
own, so that the next run need not build them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from subscriber.testing.binaries import find_binaries
from subscriber.testing.download import PINNED, download
from tests.docker.engine import ROOT, apt_install, docker, inspect, run

VERSIONS: Final = (14, 15, 16, 17, 18)
STANDINS: Final = Path(__file__).parent / "standins"
SUITE: Final = "trixie"
OURS: Final = "pg-subscriber-test"
_OWN: Final = "subscriber-standin"
_HOST_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")


def python_image() -> str:
    """The base image of docker/Dockerfile."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    version = re.search(r"^ARG PYTHON_VERSION=(.*)$", text, re.M)
    name = re.search(r"^FROM (python:\S+) AS build$", text, re.M)
    assert version is not None
    assert name is not None
    return name[1].replace("${PYTHON_VERSION}", version[1])


@contextlib.contextmanager
def base_images() -> Iterator[list[str]]:
    """Every base image is there. The value names those that are stand-ins."""
    missing = [name for name in (python_image(), *(f"postgres:{version}-bookworm" for version in VERSIONS)) if not _is_official(name)]
    for name in missing:
        docker("tag", _python() if name.startswith("python") else _postgres(int(name.split(":")[1].split("-")[0])), name)
    try:
        yield missing
    finally:
        # only the tag: on this machine, the official name must not stay with a stand-in
        for name in missing:
            docker("image", "rm", name)


def our_image() -> str:
    """Our image, as ``make image`` builds it."""
    run("make", "-C", ROOT, "image", f"IMAGE={OURS}", timeout=1800)
    return OURS


def _exists(name: str) -> bool:
    return bool(docker("image", "ls", "--quiet", name).strip())


def _is_official(name: str) -> bool:
    """Whether the engine has an image of this name that is not a stand-in, which the tag of a killed run would be."""
    return _exists(name) and not any(tag.startswith(_OWN) for tag in inspect("image", name)["RepoTags"])


def _base() -> str:
    name = f"{_OWN}:{SUITE}"
    if _exists(name):
        return name
    if shutil.which("debootstrap") is None:
        apt_install("debootstrap")
    with tempfile.TemporaryDirectory(prefix="subscriber-debootstrap-") as directory:
        root = Path(directory, "root")
        run("debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, root, timeout=1800)
        if _HOST_CERTIFICATES.exists():
            shutil.copyfile(_HOST_CERTIFICATES, root / _HOST_CERTIFICATES.relative_to("/"))
        for unneeded in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / unneeded, ignore_errors=True)
            (root / unneeded).mkdir()
        packed = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
        with packed:
            subprocess.run(["docker", "import", "-", name], stdin=packed.stdout, stdout=subprocess.DEVNULL, check=True, timeout=600)
        assert packed.returncode == 0
    return name


def _build(kind: str, context: Path, **arguments: str) -> str:
    """A stand-in. Its tag is a hash of what it is made of."""
    recipe = STANDINS / f"{kind}.Dockerfile"
    digest = hashlib.sha256(repr(sorted(arguments.items())).encode())
    for file in (recipe, *sorted(path for path in context.iterdir() if path.is_file())):
        digest.update(file.read_bytes())
    name = f"{_OWN}-{kind}:{digest.hexdigest()[:16]}"
    if not _exists(name):
        words = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        docker("build", "--file", recipe, "--build-arg", f"BASE={_base()}", *words, "--tag", name, context, timeout=1800)
    return name


def _python() -> str:
    with tempfile.TemporaryDirectory(prefix="subscriber-standin-") as name:
        context = Path(name)
        # pip's settings of this machine, without its paths
        settings = {key[4:].lower().replace("_", "-"): value for key, value in os.environ.items() if key.startswith("PIP_")}
        kept = {key: value for key, value in settings.items() if key in {"index-url", "extra-index-url", "trusted-host", "default-timeout"}}
        (context / "pip.conf").write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in sorted(kept.items())))
        return _build("python", context)


def _postgres(version: int) -> str:
    with tempfile.TemporaryDirectory(prefix="subscriber-standin-") as name:
        context = Path(name)
        server = download(version).parent if version in PINNED and version != 18 else find_binaries(version).parent
        _copy_server(server, context / "server")
        _copy_server(find_binaries(18).parent, context / "client")
        shutil.copy(STANDINS / "entrypoint.sh", context)
        volume = "/var/lib/postgresql" if version >= 18 else "/var/lib/postgresql/data"
        data = f"/var/lib/postgresql/{version}/docker" if version >= 18 else volume
        release = run(server / "bin" / "postgres", "--version").split()[-1]
        return _build("postgres", context, VERSION=str(version), RELEASE=release, DATA=data, VOLUME=volume)


def _copy_server(install: Path, target: Path) -> None:
    """With the layout that its libraries are found in: those of a wheel are beside the package."""
    libraries = install.parent.with_name(f"{install.parent.name}.libs")
    shutil.copytree(install, target / install.parent.name / install.name, symlinks=True)
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name)
