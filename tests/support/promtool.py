"""The alert rules of the documentation, judged by Prometheus' own promtool on what a program gives.

``python -m tests.support.promtool`` puts promtool beside this Python, from Debian's package; as root.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from subscriber.testing.apt import may_install

MONITORING = Path(__file__).parents[2] / "docs/monitoring"
RULES = {rule["alert"]: rule for rule in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]}
_OWN = Path(sys.prefix, "bin", "promtool")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it. The test is skipped where it is not installed."""
    found = _OWN if _OWN.exists() else shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: make promtool, or apt-get install prometheus")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False)


def fires(text: str, alert: str) -> bool:
    """Whether the alert fires if the program goes on to give these metrics."""
    return _holds(text, f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)', 1)


def none_fires(text: str) -> bool:
    """Whether no alert fires or is pending."""
    return _holds(text, "count(ALERTS) or vector(0)", 0)


def _holds(text: str, expression: str, value: int) -> bool:
    series = [{"series": f"{name}{{{labels}}}", "values": f"{number}x60"} for name, labels, number in _samples(text)]
    series.append({"series": 'up{job="subscriber",instance="test"}', "values": "1x60"})
    expected = {"expr": expression, "eval_time": "45m", "exp_samples": [{"labels": "{}", "value": value}]}
    test = {
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [expected]}],
    }
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "test.yaml")
        file.write_text(json.dumps(test))
        done = promtool("test", "rules", file)
    if done.returncode == 0:
        return True
    assert "exp:" in done.stdout + done.stderr, done.stdout + done.stderr
    return False


def _samples(text: str) -> list[tuple[str, str, str]]:
    found = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels: dict[str, Any] = {**sample.labels, "job": "subscriber", "instance": "test"}
            found.append((sample.name, ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()), f"{sample.value:.17g}"))
    return found


def _install() -> None:
    with tempfile.TemporaryDirectory() as directory:

        def run(command: str) -> bool:
            return subprocess.run(["sh", "-c", command], cwd=directory, capture_output=True, check=False).returncode == 0

        # the package itself would start a server
        download = "apt-get download prometheus"
        if (run(download) or (run("apt-get update") and run(download))) and run("dpkg-deb --extract prometheus_*.deb ."):
            shutil.copy(Path(directory, "usr/bin/promtool"), _OWN)
        else:
            print("promtool could not be downloaded: its tests are skipped")


if __name__ == "__main__" and may_install() and not _OWN.exists() and shutil.which("promtool") is None:
    _install()
