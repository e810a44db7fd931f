"""A standalone Spark master with two workers on loopback, from the pip package's own classes; and this program as a wheel for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PATIENCE = 180.0
# a machine of CI is small; nothing here is about speed
_DAEMON = {
    "SPARK_DAEMON_MEMORY": "256m",
    # a killed executor is normal here, too
    "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dspark.deploy.maxExecutorRetries=-1",
}
CONF: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    # a task whose executor was killed is normal here
    "spark.task.maxFailures": "8",
}


def spark_home() -> Path:
    """Of the pip package."""
    import pyspark

    return Path(pyspark.__file__).parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def build_wheel(directory: Path) -> Path:
    """``pip wheel . --no-deps``."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=_PATIENCE)
    (wheel,) = directory.glob("pg_subscriber-*.whl")
    return wheel


def bare_python(directory: Path) -> Path:
    """A Python that has all packages of this environment, but not this program, which is installed here as a link to its sources."""
    home = directory / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=_PATIENCE)
    python = home / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    # a path in a .pth file is added; .pth files that lie there are not read
    (Path(site) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    check = [str(python), "-c", "import pyarrow; import subscriber"]
    missing = subprocess.run(check, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert "No module named 'subscriber'" in missing.stderr, missing
    return python


@dataclass
class Cluster:
    """Master and workers, each a process."""

    directory: Path
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def start(self, workers: int = 2) -> None:
        web = free_port()
        self._daemon(
            "master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(web)
        )
        for number in range(workers):
            arguments = ("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", str(free_port()))
            work = self.directory / f"worker{number}"
            self._daemon(f"worker{number}", "org.apache.spark.deploy.worker.Worker", *arguments, "--work-dir", str(work), self.master)
        deadline = time.monotonic() + _PATIENCE
        while self._alive(web) < workers:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def _alive(self, web: int) -> int:
        import json

        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{web}/json/", timeout=10) as answer:
                return int(json.load(answer)["aliveworkers"])
        except (OSError, ValueError):
            return 0

    def _daemon(self, name: str, java_class: str, *arguments: str) -> None:
        environment = {**os.environ, **_DAEMON, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(spark_home())}
        with (self.directory / f"{name}.log").open("ab") as log:
            command = [str(spark_home() / "bin" / "spark-class"), java_class, *arguments]
            # a group of its own: a worker's executors end with it
            made = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(made)

    def executors(self) -> list[int]:
        """Processes of Java that work for an application now."""
        below = [child for worker in self.processes[1:] for child in descendants(worker.pid)]
        commands = {child: command_of(child) for child in below}
        return [
            child for child, command in commands.items() if "CoarseGrainedExecutorBackend" in command and "java" in command.split(" ")[0]
        ]

    def cpu_seconds(self) -> float:
        """Processor time of the workers and of all that runs below them, so far. An executor that has ended is not counted."""
        ticks = 0
        for pid in [child for worker in self.processes[1:] for child in descendants(worker.pid)]:
            with contextlib.suppress(OSError):
                fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        import signal

        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def log(self) -> str:
        texts = [(path.name, path.read_text(errors="replace").splitlines()[-15:]) for path in sorted(self.directory.glob("*.log"))]
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in texts)


@contextlib.contextmanager
def cluster(directory: Path, workers: int = 2) -> Iterator[Cluster]:
    directory.mkdir(parents=True, exist_ok=True)
    found = Cluster(directory)
    try:
        found.start(workers)
        yield found
    finally:
        found.stop()


def descendants(pid: int) -> list[int]:
    """Processes below one, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def command_of(pid: int) -> str:
    """Its command line; empty if it has ended."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
