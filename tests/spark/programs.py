"""The two programs of a lake as processes: the subscriber, and the applier as a Spark application, started directly or by spark-submit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.process import QUICK
from tests.spark.cluster import CONF, command_of, descendants, spark_home
from tests.support.database import Database


@dataclass
class Running:
    """A program that is started again and again, and its log."""

    command: Sequence[str]
    log_file: Path
    environment: Mapping[str, str]
    directory: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, *more], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(self.environment), cwd=self.directory
            )
        return self.process

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def java(self) -> int | None:
        """The Java process of a driver."""
        found = [pid for pid in descendants(self.pid) if "SparkSubmit" in command_of(pid)]
        return found[0] if found else None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self, patience: float = 60) -> int | None:
        """SIGTERM, at the end of a test, and what has to follow if that is of no use."""
        if self.process is None:
            return None
        below = descendants(self.pid) if self.runs() else []
        if self.runs():
            self.process.terminate()
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
            status = None
        for pid in below:
            if "SparkSubmit" in command_of(pid):
                os.kill(pid, 9)
        return status

    def log(self, lines: int = 40) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])


def subscriber(publisher: Database, directory: Path, parameters: str, *more: str) -> Running:
    settings = [argument for setting in (*QUICK, f"spool_directory={directory / 'spool'}") for argument in ("-c", setting)]
    command = [sys.executable, "-m", "subscriber", "-v", "run", "--connection", publisher.conninfo(), "--publication", "pub"]
    command += ["--target", f"spark://{directory / 'lake'}{parameters}", "--name", f"lake_{publisher.name}", *settings, *more]
    return Running(command, directory / "subscriber.log", os.environ, directory)


def program(directory: Path, arguments: Sequence[str], conf: Mapping[str, str], environment: Mapping[str, str]) -> Running:
    """``subscriber VERB …``, whose executors, if any, have this environment's Python and this program."""
    command = [sys.executable, "-m", "subscriber", "-v", *arguments]
    for name, value in conf.items():
        command += ["--conf", f"{name}={value}"]
    return Running(command, directory / f"{arguments[0]}.log", {**_environment(Path(sys.executable)), **environment}, directory)


def _environment(python: Path) -> dict[str, str]:
    return {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": str(python), "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1"}


def applier(directory: Path, master: str, wheel: Path, python: Path, conf: Mapping[str, str], *more: str) -> Running:
    """``subscriber spark-apply --master …``; its executors have ``python``, and this program from the wheel only."""
    command = [
        sys.executable,
        "-m",
        "subscriber",
        "-v",
        "spark-apply",
        str(directory / "lake"),
        "--master",
        master,
        "--py-files",
        str(wheel),
    ]
    for name, value in {**CONF, **conf}.items():
        command += ["--conf", f"{name}={value}"]
    return Running([*command, *more], directory / "applier.log", _environment(python), directory)


def submitted(directory: Path, master: str, wheel: Path, python: Path, conf: Mapping[str, str], *more: str) -> Running:
    """The same by ``spark-submit``: the driver, too, has this program from the wheel only."""
    main = directory / "apply.py"
    main.write_text("import sys\nfrom subscriber.cli import main\nsys.exit(main())\n")
    command = [str(spark_home() / "bin" / "spark-submit"), "--master", master, "--py-files", str(wheel)]
    for name, value in {**CONF, **conf}.items():
        command += ["--conf", f"{name}={value}"]
    command += [str(main), "-v", "spark-apply", str(directory / "lake"), *more]
    return Running(command, directory / "submitted.log", _environment(python), directory)
