"""What a connection string may do: passwords are never sent as they are, and a stored string gets none that is not for its address."""

from __future__ import annotations

import pytest

from subscriber import ConfigurationError
from subscriber.protocol.conninfo import NO_WEAK_METHOD, SCRAM, secured


@pytest.mark.parametrize(
    ("parameters", "environment", "expected"),
    [
        ({"host": "db1"}, {}, NO_WEAK_METHOD),
        ({"host": "db1", "password": "p"}, {}, SCRAM),
        ({"host": "db1"}, {"PGPASSWORD": "p"}, f"{SCRAM},none"),
        ({}, {"PGPASSWORD": "p", "PGHOST": "db1"}, f"{SCRAM},none"),
        ({"host": "db1", "password": "p", "sslcert": "c"}, {}, f"{SCRAM},none"),
        ({"host": "/run", "password": "p"}, {}, NO_WEAK_METHOD),
        ({"password": "p"}, {}, NO_WEAK_METHOD),
        ({"hostaddr": "10.0.0.1", "password": "p"}, {}, SCRAM),
        ({"host": "db1", "require_auth": "md5"}, {"PGPASSWORD": "p"}, "md5"),
        ({"host": "db1"}, {"PGREQUIREAUTH": "none"}, None),
        ({"service": "s"}, {}, None),
    ],
)
def test_authentication_that_is_required(parameters: dict[str, str], environment: dict[str, str], expected: str | None) -> None:
    assert secured(parameters, stored=False, environment=environment).get("require_auth") == expected


def test_stored_string_gets_no_password_that_is_not_for_its_address() -> None:
    found = secured({"host": "evil"}, stored=True, environment={"PGPASSWORD": "p"})
    assert found == {"host": "evil", "password": "", "require_auth": NO_WEAK_METHOD}
    own = {"host": "db1", "hostaddr": "10.0.0.1", "password": "own"}
    assert secured(own, stored=True, environment={}) == {**own, "require_auth": SCRAM}
    assert secured({"service": "s"}, stored=True, environment={}) == {"service": "s"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"host": "db1", "hostaddr": "6.6.6.6", "require_auth": "password"}, "has host and hostaddr"),
        ({"service": "s", "host": "evil"}, "has an address and a service"),
        ({"servicefile": "/tmp/evil"}, "has servicefile"),
        ({"host": "evil", "sslkeylogfile": "/home/x/.bashrc"}, "has sslkeylogfile"),
        ({"host": "evil", "gssdelegation": "1"}, "has gssdelegation"),
    ],
)
def test_stored_string_that_is_refused(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        secured(parameters, stored=True, environment={})
    secured(parameters, stored=False, environment={})
