"""URLs that a driver rejects: an error of this package, before a server is contacted."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncEngine

from subscriber.errors import ConfigurationError, TargetError
from subscriber.sinks.sqlalchemy.session.database import Database

UNKNOWN = 'the target\'s driver does not know the parameter "foo" of its URL'
VALUE = "a parameter of the target's URL has a value that its driver rejects"
SINCE_21 = pytest.mark.skipif(sqlalchemy.__version__ < "2.1", reason="SQLAlchemy 2.0 ignores parameters that it does not know")
URLS = [
    pytest.param("sqlite:///{file}?foo=hush", UNKNOWN, marks=SINCE_21),
    ("sqlite:///{file}?timeout=hush", VALUE),
    pytest.param("mariadb://u:hush@127.0.0.1:1/x?foo=hush", UNKNOWN, marks=SINCE_21),
    ("mariadb://u:hush@127.0.0.1:1/x?connect_timeout=hush", VALUE),
    ("mariadb://u:hush@127.0.0.1:99999/x", VALUE),
    ("postgresql+asyncpg://u:hush@127.0.0.1:1/x", 'a PostgreSQL target is postgresql://, not "postgresql+asyncpg://"'),
]


@pytest.mark.parametrize(("url", "said"), URLS)
async def test_parameters_that_the_driver_does_not_take(url: str, said: str, tmp_path: Path) -> None:
    """The bug was that these ended in the driver's traceback."""
    with pytest.raises(ConfigurationError) as caught:
        await Database(url.format(file=tmp_path / "replica.db")).connect()
    assert str(caught.value) == said
    assert caught.value.hint
    assert "hush" not in caught.value.one_line()
    assert caught.value.__cause__ is None


async def test_a_package_that_the_login_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was a traceback: without TLS, MySQL's caching_sha2_password needs one that the driver imports only then."""

    def connect(_: AsyncEngine) -> None:
        raise RuntimeError("'cryptography' package is required for sha256_password or caching_sha2_password auth methods")

    monkeypatch.setattr(AsyncEngine, "connect", connect)
    with pytest.raises(TargetError) as caught:
        await Database("mysql://u:hush@127.0.0.1:1/x").connect()
    assert caught.value.one_line() == (
        "the target's driver cannot log in: 'cryptography' package is required for sha256_password or caching_sha2_password auth methods"
        " (hint: install the package that it names)"
    )
