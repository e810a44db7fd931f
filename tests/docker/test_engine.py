"""The apt step of ``make test-docker``, in a container of Debian."""

from __future__ import annotations

import pytest

from tests.docker.engine import LABEL, ROOT, docker
from tests.docker.images import python_image

_PROGRAM = """
import shutil
from tests.docker.engine import install_engine, run
assert shutil.which("docker") is shutil.which("dockerd") is None
install_engine()
print(run("docker", "--version"), run("dockerd", "--version"))
"""


@pytest.mark.usefixtures("standins")
def test_engine_is_installed_where_there_is_none() -> None:
    checkout = ("--volume", f"{ROOT}:/src:ro", "--workdir", "/src", "--env", "PYTHONDONTWRITEBYTECODE=1")
    versions = docker("run", "--rm", "--label", LABEL, *checkout, python_image(), "python", "-c", _PROGRAM, timeout=1200)
    assert versions.count("Docker version ") == 2
