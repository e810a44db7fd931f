"""What a connection string may do, and which authentication it accepts. Pure: libpq and asyncpg are elsewhere.

A server that asks for a password in cleartext gets it, unless the client refuses. So every session refuses cleartext and MD5. Where a
password is given (in the string, or by PGPASSWORD) the server must use SCRAM, which also proves that it knows the password. libpq's
``require_auth`` says so; a value of the user is kept. A connection by a Unix socket may also be trusted or identified by the peer.

A string that a row or a file of another program holds (:class:`StoredConninfo`) names an address. It gets no secret of this host that is
not bound to an address: no PGPASSWORD, no password of a service for another host. A passfile is bound: each line names its host.

Source: PostgreSQL manual, 32.1.2 (Parameter Key Words), 32.16 (The Password File).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from subscriber.errors import ConfigurationError

__all__ = ["NO_WEAK_METHOD", "SCRAM", "StoredConninfo", "secured"]

SCRAM: Final = "scram-sha-256"
NO_WEAK_METHOD: Final = "!password,!md5"

_REFUSED: Final = ("servicefile", "sslkeylogfile", "gssdelegation")
"""A file that another program may have written, a file that libpq writes, and credentials that libpq passes on."""


class StoredConninfo(str):
    """A connection string from a row of a target's catalog, or from a file of a lake."""

    __slots__ = ()


def secured(parameters: Mapping[str, Any], *, stored: bool, environment: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a connection string, with those that protect passwords.

    Args:
        parameters: by keyword.
        stored: whether the string is a :class:`StoredConninfo`.
        environment: of the process.

    Raises:
        ConfigurationError: the string has a parameter that a stored one may not have.
    """
    found = dict(parameters)
    if stored:
        _confine(found)
    # PGPASSWORD may be meant for the other side, whose server may ask for none
    own = bool(found.get("password"))
    password = own or ("password" not in found and bool(environment.get("PGPASSWORD")))
    has_service = found.get("service") or environment.get("PGSERVICE")
    if found.get("require_auth") or environment.get("PGREQUIREAUTH") or has_service:
        # a service may set require_auth, and a parameter here would take its place
        return found
    host = str(found.get("hostaddr") or found.get("host") or environment.get("PGHOST", ""))
    if not password or not host or host.startswith(("/", "@")):
        found["require_auth"] = NO_WEAK_METHOD
    else:
        # libpq calls it "none" if a client certificate is enough for the server
        may_be_none = not own or found.get("sslcert") or environment.get("PGSSLCERT")
        found["require_auth"] = f"{SCRAM},none" if may_be_none else SCRAM
    return found


def _confine(parameters: dict[str, Any]) -> None:
    for name in _REFUSED:
        if parameters.get(name):
            raise ConfigurationError(
                f"a stored connection string has {name}, which is only accepted from the command line",
                hint="store the subscription's connection without it: `subscriber alter --connection`",
            )
    has_password = bool(parameters.get("password"))
    if parameters.get("service"):
        if not has_password and any(parameters.get(name) for name in ("host", "hostaddr", "port")):
            raise ConfigurationError(
                "a stored connection string has an address and a service, whose password may be meant for another address",
                hint="store the service alone, or the address alone: `subscriber alter --connection`",
            )
        return
    if parameters.get("host") and parameters.get("hostaddr") and not has_password:
        raise ConfigurationError(
            "a stored connection string has host and hostaddr: the passfile's password for the one would go to the other",
            hint="store one of them: `subscriber alter --connection`",
        )
    # empty: libpq then reads the passfile, and not PGPASSWORD
    parameters.setdefault("password", "")
