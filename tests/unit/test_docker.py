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

import subscriber

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
FINAL_STAGE = INSTRUCTIONS[max(index for index, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM") :]


def configuration() -> dict[str, str]:
    lines = (DOCKER / "publisher" / "postgresql.conf").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line.strip() and not line.startswith("#"))
    return {name.strip(): value.strip().strip("'") for name, value in pairs}


def test_services_are_a_target_and_two_for_each_version() -> None:
    assert set(SERVICES) == {"target"} | {f"{kind}{version}" for kind in ("publisher", "subscription") for version in VERSIONS}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_a_health_check(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert len(check["test"]) > 1
    assert not check.get("disable", False)


@pytest.mark.parametrize("name", SERVICES)
def test_no_port_is_published_beyond_the_loopback(name: str) -> None:
    assert "network_mode" not in SERVICES[name]
    for port in SERVICES[name].get("ports", []):
        assert str(port).startswith("127.0.0.1:")


def test_published_ports_differ() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == len(VERSIONS) + 1
    assert len(set(re.findall(r":-(\d+)\}", " ".join(ports)))) == len(ports)


@pytest.mark.parametrize("version", VERSIONS)
def test_publisher_is_of_its_version_with_our_settings(version: int) -> None:
    publisher = SERVICES[f"publisher{version}"]
    assert publisher["image"].startswith(f"postgres:{version}-")
    assert "config_file=/etc/postgresql/postgresql.conf" in publisher["command"]
    mounts = {where: source for source, where, *_ in (volume.split(":") for volume in publisher["volumes"])}
    assert mounts["/etc/postgresql/postgresql.conf"] == "./publisher/postgresql.conf"
    assert mounts[configuration()["hba_file"]] == "./publisher/pg_hba.conf"
    # the image of 18 keeps its data below a directory of the version, and refuses to start with the old mount
    assert mounts["/var/lib/postgresql" if version >= 18 else "/var/lib/postgresql/data"] == f"publisher{version}"


def test_publisher_settings() -> None:
    settings = configuration()
    assert settings["wal_level"] == "logical"
    assert settings["logical_decoding_work_mem"] == "64kB"
    assert int(settings["max_prepared_transactions"]) > 0
    assert int(settings["max_wal_senders"]) >= int(settings["max_replication_slots"]) > 0


def test_connections_over_the_network_need_scram() -> None:
    rules = [line.split() for line in (DOCKER / "publisher" / "pg_hba.conf").read_text().splitlines() if line and not line.startswith("#")]
    network = [rule for rule in rules if rule[0] != "local"]
    assert {rule[-1] for rule in network} == {"scram-sha-256"}
    assert {rule[1] for rule in network} == {"all", "replication"}


@pytest.mark.parametrize("version", VERSIONS)
def test_only_the_newest_publisher_starts_without_a_profile(version: int) -> None:
    expected = None if version == max(VERSIONS) else [f"pg{version}"]
    assert SERVICES[f"publisher{version}"].get("profiles") == expected
    assert SERVICES[f"subscription{version}"].get("profiles") == expected
    assert "profiles" not in SERVICES["target"]


@pytest.mark.parametrize("version", VERSIONS)
def test_subscription_runs_our_image_against_its_own_servers(version: int) -> None:
    service = SERVICES[f"subscription{version}"]
    assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert service["depends_on"] == {name: {"condition": "service_healthy"} for name in (f"publisher{version}", "target")}
    verb, *arguments = service["command"]
    assert verb == "run"
    assert f"--connection=host=publisher{version} user=subscriber dbname=app" in arguments
    assert "--publication=app" in arguments
    # what the health check asks about is what runs
    _, python, script, *asked = service["healthcheck"]["test"]
    assert python == "python"
    assert f"COPY docker/healthcheck.py {script}" in {f"{name} {rest}" for name, rest in FINAL_STAGE}
    assert {word.split("=")[0] for word in asked} == {"--connection", "--target", "--name"}
    assert set(asked) <= set(arguments)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_every_subscription_has_a_database_of_its_own_that_the_init_script_makes() -> None:
    targets = [word for version in VERSIONS for word in SERVICES[f"subscription{version}"]["command"] if word.startswith("--target=")]
    databases = [target.rpartition("/")[2] for target in targets]
    script = (DOCKER / "target" / "init.sql").read_text()
    assert len(set(databases)) == len(VERSIONS)
    for database in databases:
        assert f"CREATE DATABASE {database} OWNER subscriber;" in script
        assert f"\\connect {database}\nSET ROLE subscriber;\n\\ir ../schema.sql" in script


def test_every_mounted_file_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source, _, mode = (*volume.split(":"), "rw")[:3]
            if source.startswith("."):
                assert (DOCKER / source).is_file()
                assert mode == "ro"
            else:
                assert source in COMPOSE["volumes"]


def test_passwords_come_from_the_environment_with_defaults_that_say_what_they_are() -> None:
    for service in SERVICES.values():
        secrets = {name: value for name, value in service["environment"].items() if name.endswith("PASSWORD")}
        assert secrets
        for value in secrets.values():
            assert re.fullmatch(r"\$\{[A-Z_]+:-development-only\}", value)
        for word in (*service["command"], *service["healthcheck"]["test"]):
            assert "password" not in word.lower()
            assert not re.search(r"//[^/@]*:[^/@]*@", word)


def test_the_image_does_not_run_as_root() -> None:
    users = [rest for name, rest in FINAL_STAGE if name == "USER"]
    assert len(users) == 1
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[0])
    # nothing that runs as root comes after it
    after = [name for name, _ in FINAL_STAGE[[name for name, _ in FINAL_STAGE].index("USER") + 1 :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)


def test_the_image_runs_the_command_in_exec_form() -> None:
    # the shell form would put a shell between SIGTERM and us
    assert ("ENTRYPOINT", '["subscriber"]') in FINAL_STAGE
    assert ("STOPSIGNAL", "SIGTERM") in FINAL_STAGE


def test_the_image_installs_what_constraints_pin_and_nothing_of_the_build_stays() -> None:
    settings = " ".join(rest for name, rest in INSTRUCTIONS if name == "ENV")
    assert "PIP_CONSTRAINT=/src/constraints.txt" in settings
    assert "PIP_BUILD_CONSTRAINT=/src/constraints.txt" in settings
    assert all("pip" not in rest for name, rest in FINAL_STAGE if name == "RUN")
    assert [rest for name, rest in FINAL_STAGE if name == "COPY" and rest.startswith("--from=")] == [
        "--from=build /opt/subscriber /opt/subscriber"
    ]


def test_image_has_the_extras_that_the_documentation_names() -> None:
    (extras,) = (rest.removeprefix("EXTRAS=") for name, rest in INSTRUCTIONS if name == "ARG" and rest.startswith("EXTRAS="))
    page = (ROOT / "docs" / "howto" / "docker.md").read_text()
    assert re.findall(r"`(\w+)`", page.split("has the extras", 1)[1].split(".")[0]) == extras.split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    spark = yaml.safe_load((DOCKER / "spark" / "compose.yaml").read_text())["x-program"]["build"]["args"]["EXTRAS"]
    assert {*extras.split(","), *spark.split(",")} <= set(project)


def test_the_image_is_labelled_with_the_version() -> None:
    assert ("ARG", f"VERSION={subscriber.__version__}") in FINAL_STAGE
    labels = " ".join(rest for name, rest in FINAL_STAGE if name == "LABEL")
    for key in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{key}=" in labels


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


def test_applier_of_a_lake_is_unhealthy_if_it_does_not_apply() -> None:
    services = yaml.safe_load((DOCKER / "spark" / "compose.yaml").read_text())["services"]
    # without a limit, `status --check` tells only whether the subscriber lands changes
    assert "--max-lag" in services["applier"]["healthcheck"]["test"]
    assert "--check" in services["subscriber"]["healthcheck"]["test"]
