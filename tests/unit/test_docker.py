"""docker/ keeps its promises, as far as reading the files can tell. No engine is needed, and none is here."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
VERSIONS = (14, 15, 16, 17, 18)

COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
INSTRUCTIONS: list[tuple[str, str]] = [
    (match[1], match[2].strip())
    for match in re.finditer(
        r"^([A-Z]+)\s+(.*)$", re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.M)), re.M
    )
]


@pytest.mark.parametrize("name", SERVICES)
def test_no_port_is_published_beyond_the_loopback(name: str) -> None:
    assert "network_mode" not in SERVICES[name]
    for port in SERVICES[name].get("ports", []):
        assert str(port).startswith("127.0.0.1:")


def test_connections_over_the_network_need_scram() -> None:
    rules = [line.split() for line in (DOCKER / "publisher" / "pg_hba.conf").read_text().splitlines() if line and not line.startswith("#")]
    network = [rule for rule in rules if rule[0] != "local"]
    assert {rule[-1] for rule in network} == {"scram-sha-256"}
    assert {rule[1] for rule in network} == {"all", "replication"}


def test_passwords_come_from_the_environment_with_defaults_that_say_what_they_are() -> None:
    for service in SERVICES.values():
        secrets = {name: value for name, value in service["environment"].items() if name.endswith("PASSWORD")}
        assert secrets
        for value in secrets.values():
            assert re.fullmatch(r"\$\{[A-Z_]+:-development-only(-\w+)?\}", value)
        for word in (*service["command"], *service["healthcheck"]["test"]):
            assert "password" not in word.lower()
            assert not re.search(r"//[^/@]*:[^/@]*@", word)


@pytest.mark.parametrize("name", ["requirements.txt", "build-requirements.txt"])
def test_packages_of_the_image_have_hashes(name: str) -> None:
    """As `make hashes` writes them: pip installs nothing else with --require-hashes. Their versions are those of constraints.txt."""
    pins = {re.sub(r"[._]", "-", line.lower().strip()) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    found = re.findall(r"^([a-z0-9-]+)==(\S+)(( \\\n    --hash=sha256:[0-9a-f]{64})*)$", (DOCKER / name).read_text(), re.M)
    assert len(found) > 5
    assert [package for package, *_, last in found if not last] == []
    assert {re.sub(r"[._]", "-", f"{package}=={version}") for package, version, *_ in found} <= pins
    if name == "requirements.txt":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        # of each extra that a build may ask for
        wanted = [*project["dependencies"], *(each for found in project["optional-dependencies"].values() for each in found)]
        names = {re.split(r"[^\w-]", each)[0].lower() for each in wanted} - {"pg-subscriber"}
        assert names <= {package for package, *_ in found}


def test_image_has_the_extras_that_the_documentation_names() -> None:
    (extras,) = [rest.removeprefix("EXTRAS=") for name, rest in INSTRUCTIONS if name == "ARG" and rest.startswith("EXTRAS=")]
    page = (ROOT / "docs" / "howto" / "docker.md").read_text()
    assert re.findall(r"`(\w+)`", page.split("has the extras", 1)[1].split(".")[0]) == extras.split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    spark = yaml.safe_load((DOCKER / "spark" / "compose.yaml").read_text())["x-program"]["build"]["args"]["EXTRAS"]
    assert {*extras.split(","), *spark.split(",")} <= set(project)


def test_build_context_has_only_the_copied_files() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {source for name, rest in INSTRUCTIONS if name == "COPY" and not rest.startswith("--from=") for source in rest.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)
    assert any(fnmatch.fnmatch(PurePosixPath("subscriber/cli/__pycache__").as_posix(), rule) for rule in rules[1:] if rule[0] != "!")


@pytest.mark.parametrize("target", ["sqlite:///replica.db", "mysql://target/app"])
def test_health_check_names_a_target_that_is_not_postgresql(target: str) -> None:
    words = [sys.executable, str(DOCKER / "healthcheck.py"), "--connection=host=publisher", f"--target={target}", "--name=copy"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (1, "the target is not given as a connection string of PostgreSQL\n")
