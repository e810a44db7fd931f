"""``config systemd``: a unit that runs a configuration file, with no more rights than it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from subscriber.config.file.configuration import Configuration
from subscriber.errors import ConfigurationError

__all__ = ["systemd_unit"]

_UNIT: Final = """\
# made by: subscriber config systemd
[Unit]
Description=PostgreSQL subscriber
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
User={user}
Environment=PYTHONUNBUFFERED=1
ExecStart={program} run --config {file}
ExecReload=/bin/kill -HUP $MAINPID
Restart=always
RestartSec=5
# wrong arguments: starting again does not help
RestartPreventExitStatus=2
# the program tells systemd that its event loop turns; a start may wait for a server
WatchdogSec=60
TimeoutStartSec=120
TimeoutStopSec=60
LimitNOFILE=65536
# subscriptions that use a secret from the environment: NAME=value, mode 0600
EnvironmentFile=-/etc/subscriber/environment
{writable}
# hardening: systemd-analyze security explains each line
NoNewPrivileges=true
CapabilityBoundingSet=
AmbientCapabilities=
PrivateTmp=true
PrivateDevices=true
ProtectSystem=strict
ProtectHome=read-only
ProtectClock=true
ProtectControlGroups=true
ProtectHostname=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
LockPersonality=true
RemoveIPC=true
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077

[Install]
WantedBy=multi-user.target
"""


def systemd_unit(file: str, configuration: Configuration, user: str) -> str:
    """Return the unit.

    Args:
        file: the configuration file.
        configuration: what it says: its directories become writable.
        user: runs the program.

    Raises:
        ConfigurationError: a path or the user cannot be written into a unit.
    """
    path = Path(file).resolve()
    program = Path(sys.argv[0]).resolve() if Path(sys.argv[0]).name == "subscriber" else Path(sys.executable).with_name("subscriber")
    writable = sorted(_writable(configuration))
    for text in (str(path), str(program), user, *writable):
        if not text or any(each.isspace() or each in "\"'\\%$;" or not each.isprintable() for each in text):
            raise ConfigurationError(f"{text} cannot be written into a unit", hint="use names without blanks, quotes, %, $ and backslashes")
    lines = "\n".join(["# files of the program", *(f"ReadWritePaths={each}" for each in writable)]) if writable else ""
    return _UNIT.format(user=user, program=program, file=path, writable=lines).replace("\n\n\n", "\n\n")


def _writable(configuration: Configuration) -> set[str]:
    """The directories that the program writes to."""
    found = {str(Path(configuration.log.file).resolve().parent)} if configuration.log.file else set()
    for settings in (configuration.settings, *(each.settings for each in configuration.subscriptions.values())):
        found |= {str(Path(settings[name]).resolve()) for name in ("spool_directory", "relay_log") if settings.get(name)}
    for target in [*configuration.targets.values(), *(each.target for each in configuration.subscriptions.values())]:
        scheme, separator, rest = target.url.partition("://")
        path = "/" + rest.partition("?")[0].lstrip("/")
        if separator and rest.startswith("/"):
            if scheme.startswith("sqlite"):
                found.add(str(Path(path).parent))
            elif scheme == "spark":
                found.add(path)
    return found
