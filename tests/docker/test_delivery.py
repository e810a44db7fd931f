"""What users get: a bill of materials, a manifest for Kubernetes, and a fixture with its tutorial."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.docker.engine import ROOT, run
from tests.support.code_blocks import blocks

TUTORIAL = "docs/tutorials/containers.md"


def test_bill_of_materials_has_the_pinned_packages_only(image: str) -> None:
    run("make", "-C", ROOT, "sbom", f"IMAGE={image}", timeout=1800)
    components = json.loads((ROOT / "build" / "sbom.json").read_text())["components"]
    found = {component["name"].lower(): component["version"] for component in components if "pkg:pypi/" in component.get("purl", "")}
    pins = dict(line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {re.sub(r"[._]", "-", name): version for name, version in pins.items()}
    found = {re.sub(r"[._]", "-", name): version for name, version in found.items()}
    # pip is of the base image
    ours = {name: version for name, version in found.items() if name not in {"pg-subscriber", "pip", "setuptools"}}
    assert {"asyncpg", "psycopg", "psycopg-binary", "sqlalchemy"} <= set(ours)
    assert ours == {name: pins[name] for name in ours}
    assert any("pkg:deb/" in component.get("purl", "") for component in components)


def test_manifest_is_valid_for_kubernetes() -> None:
    """Against the schemas that the package has, with unknown names rejected."""
    manifest, policy = yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text())
    for each in (manifest, policy):
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    manifest["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.timeout(900)
def test_tutorial_in_an_empty_project(standins: list[str], tmp_path: Path) -> None:
    """Each block as printed, except that pip takes this checkout instead of a release."""
    steps = [block for block in blocks() if block.page == TUTORIAL]
    text = (ROOT / TUTORIAL).read_text()
    names = re.findall(r"^Write `([\w.]+)`:$", text, re.M)
    files = [block for block in steps if block.language == "python"]
    assert len(names) == len(files) == 2
    for name, block in zip(names, files, strict=True):
        (tmp_path / name).write_text(block.text)
    install, test, _ = [block.text for block in steps if block.language == "sh"]
    assert "'pg-subscriber[" in install
    # Ryuk's image is in a registry, which this machine may not reach: see the end of the page
    environment = os.environ | {"TESTCONTAINERS_RYUK_DISABLED": "true", "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    path = f"{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}"

    def shell(script: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=tmp_path,
            env=environment | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=800,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    shell(install.replace("'pg-subscriber[", f"'{ROOT}["))
    assert "1 passed" in shell(test)


def test_tutorial_without_an_engine_is_skipped_with_a_reason(tmp_path: Path) -> None:
    names = ("conftest.py", "test_replica.py")
    for name, block in zip(names, [block for block in blocks() if block.page == TUTORIAL and block.language == "python"], strict=True):
        (tmp_path / name).write_text(block.text)
    environment = os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/no.sock", "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "no container engine answers" in done.stdout
