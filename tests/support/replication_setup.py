"""A publisher and a target that replicate, for tests that break one part of it and repair it again."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.program import Ended, has_catalog, slots, subscriber

# in every row; no message may contain it
SECRET = "row-value-of-nobody-s-business"
ALL = "SELECT id, v FROM t ORDER BY id"


@dataclass
class ReplicationSetup:
    """A table ``t`` with rows on the publisher, publication ``pub``, the same table empty in the target.

    Attributes:
        connection, connect_to: what ``--connection`` and ``--target`` say; a test changes them.
        publications: the arguments of ``--publication``.
        more: further arguments.
        password: of roles and servers that a test makes; no message may contain it.
        resources: closed at the end of the test.
    """

    publisher: Database
    target: Database
    make_server: Callable[..., EmbeddedServer]
    resources: contextlib.ExitStack
    connection: str = ""
    target_url: str = ""
    publications: list[str] = field(default_factory=lambda: ["pub"])
    more: list[str] = field(default_factory=list)
    password: str = field(default_factory=lambda: f"hush{secrets.token_hex(6)}")

    def __post_init__(self) -> None:
        self.name = f"bad_{self.publisher.name}"
        self._fill()
        self.reset_arguments()

    def _fill(self) -> None:
        for database in (self.publisher, self.target):
            database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        self.publisher.execute(f"INSERT INTO t SELECT i, '{SECRET}' FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR TABLE t")

    def reset_arguments(self) -> None:
        self.connection, self.target_url = self.publisher.dsn, self.target.dsn
        self.publications, self.more = ["pub"], []

    def arguments(self) -> list[str]:
        publications = [f"--publication={name}" for name in self.publications]
        return [f"--connection={self.connection}", f"--target={self.target_url}", f"--name={self.name}", *publications, *self.more]

    def run(self, *more: str) -> Ended:
        return subscriber("run", *self.arguments(), *more)

    def check(self) -> Ended:
        return subscriber("check", *self.arguments())

    def state(self) -> dict[str, Any]:
        """Everything that an error must leave unchanged."""
        state: dict[str, Any] = {"slots": slots(self.publisher), "catalog": has_catalog(self.target)}
        if self.target.value("SELECT to_regclass('t') IS NOT NULL"):
            state["rows"] = self.target.fetch("SELECT * FROM t ORDER BY 1")
        if state["catalog"]:
            for table in ("pg_subscription", "pg_subscription_rel", '"position"', "prepared_transaction", "copy_part"):
                state[table] = self.target.fetch(f"SELECT * FROM subscriber.{table} ORDER BY 1, 2")
        return state

    def secrets(self) -> list[str]:
        secrets = [SECRET, self.password]
        for url in (self.publisher.dsn, self.target.dsn):
            match = re.match(r"postgresql://[^:]*:([^@]+)@", url)
            assert match is not None
            secrets.append(match[1])
        return secrets

    def assert_error(self, done: Ended, message: str, *, findings: int = 1) -> str:
        """Each error has its own line with a hint; the first line matches and is returned. No secret is shown."""
        assert (done.status, done.output) == (1, "")
        warnings = [line for line in done.errors.splitlines() if " WARNING " in line]
        lines = [line for line in done.errors.splitlines() if line not in warnings]
        assert len(lines) == findings, done.errors
        assert done.errors.endswith("\n")
        for line in lines:
            assert line.startswith("subscriber: "), line
            assert "(hint: " in line, line
        assert re.search(message, lines[0]), lines[0]
        self.assert_no_secrets(done)
        return lines[0]

    def assert_no_secrets(self, done: Ended) -> None:
        assert "Traceback" not in done.errors
        for secret in self.secrets():
            assert secret not in done.errors + done.output

    def assert_replicates(self) -> None:
        """Nothing was lost: a run ends without a message, and publisher and target have the same rows."""
        self.publisher.execute(f"INSERT INTO t SELECT max(id) + 1, '{SECRET}' FROM t")
        done = self.run("--until-caught-up")
        assert (done.status, done.output, done.errors) == (0, "", "")
        assert self.target.fetch(ALL) == self.publisher.fetch(ALL)

    def move_publisher(self, **settings: str) -> EmbeddedServer:
        """Move the database to a server of this test alone."""
        server = self.make_server(18, **settings)
        self.publisher = self.resources.enter_context(fresh_database(ServerAddress(server.dsn(), 18), "pub"))
        self._move()
        return server

    def move_target(self, **settings: str) -> EmbeddedServer:
        """Move the database to a server of this test alone."""
        server = self.make_server(18, **settings)
        self.target = self.resources.enter_context(fresh_database(ServerAddress(server.dsn(), 18), "tgt"))
        self._move()
        return server

    def _move(self) -> None:
        for database in (self.publisher, self.target):
            database.execute("DROP PUBLICATION IF EXISTS pub; DROP TABLE IF EXISTS t")
        self._fill()
        self.reset_arguments()

    @contextlib.contextmanager
    def restarted(self, server: EmbeddedServer, database: Database) -> Iterator[None]:
        """Settings made in the block take effect at its end."""
        yield
        database.close()
        server.restart()
        database._connection = database.connect()

    def role_on(self, database: Database, attributes: str) -> tuple[str, str]:
        """Create a role with a password that no message may contain. Returns its name and the URL to connect as it."""
        name = f"r_{secrets.token_hex(4)}"
        database.execute(f"CREATE ROLE {name} LOGIN {attributes} PASSWORD '{self.password}'")

        def remove() -> None:
            database.wait(f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{name}'", 0)
            database.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")

        self.resources.callback(remove)
        return name, database.conninfo(user=name, password=self.password)
