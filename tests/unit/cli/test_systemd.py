"""What systemd is told, and the unit."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from subscriber.cli.main import main
from subscriber.cli.service.systemd import Notifier, notifying

SUBSCRIPTION = '[subscriptions.app]\nconnection = "host=db1"\npublications = ["app"]\ntarget = "copy"\n'


@pytest.mark.parametrize("abstract", [False, True])
async def test_notifications(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"@subscriber-{os.getpid()}" if abstract else str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        states = iter([(False, "1 connecting"), (True, "1 copying\u2026")])
        state = next(states)
        loop = asyncio.get_running_loop()

        async def received() -> list[str]:
            return (await loop.sock_recv(manager, 4096)).decode().splitlines()

        async with notifying(lambda: state):
            assert await received() == ["WATCHDOG=1", "STATUS=1 connecting"]
            assert await received() == ["WATCHDOG=1"]
            state = next(states)
            while (told := await received()) == ["WATCHDOG=1"]:
                pass
            assert told == ["WATCHDOG=1", "READY=1", "STATUS=1 copying\u2026"]
            assert await received() == ["WATCHDOG=1"]
        while (told := await received()) == ["WATCHDOG=1"]:
            pass
        assert told[0] == "STOPPING=1"


def test_a_watchdog_of_another_process_and_a_socket_that_is_gone(tmp_path: Path) -> None:
    other = Notifier({"NOTIFY_SOCKET": str(tmp_path / "none"), "WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"})
    assert (other.wanted, other.interval) == (True, 1.0)
    other.tell("READY=1")
    assert not Notifier({}).wanted


def test_the_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "subscriber.toml"
    # the secret is the service's, not of the user who writes the unit
    other = '[targets.other]\nurl = "mariadb://bob@db/x"\npassword = "env:NO_SUCH_NAME"\n'
    copy = '[targets.copy]\nurl = "sqlite:////var/lib/x/copy.db"\n'
    file.write_text(f'log.file = "{tmp_path}/log/x.log"\n[settings]\nrelay_log = "/var/lib/relay"\n{copy}{other}{SUBSCRIPTION}')
    assert main(["config", "systemd", str(file)]) == 0
    unit = capsys.readouterr().out
    paths = (f"{tmp_path}/log", "/var/lib/relay", "/var/lib/x")
    for line in ("Type=notify", *(f"ReadWritePaths={path}" for path in paths), "NoNewPrivileges=true"):
        assert f"\n{line}\n" in unit
    assert f"subscriber run --config {file}\n" in unit
    if shutil.which("systemd-analyze") is not None:
        path = tmp_path / "subscriber.service"
        path.write_text(unit)
        done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
        assert "Unknown key" not in done.stderr
        assert "man " not in done.stderr
    bad = tmp_path / "with blank.toml"
    file.rename(bad)
    assert main(["config", "systemd", str(bad)]) == 1
    assert "cannot be written into a unit" in capsys.readouterr().err
