"""Where bad input is tried out: a publisher and a target that fit, to be spoilt by a test and mended again."""

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

# in every row; no message may show it
SECRET = "row-value-of-nobody-s-business"
ALL = "SELECT id, v FROM t ORDER BY id"


@dataclass
class Ground:
    """A table ``t`` with rows on the publisher, publication ``pub``, the same table empty in the target.

    Attributes:
        connection, connect_to: what ``--connection`` and ``--target`` say; to be changed by whoever spoils it.
        publications: what ``--publication`` says.
        more: further arguments.
        password: of roles and servers that a test makes; no message may show it.
        resources: what is freed at the end.
    """

    publisher: Database
    target: Database
    make_server: Callable[..., EmbeddedServer]
    resources: contextlib.ExitStack
    connection: str = ""
    connect_to: str = ""
    publications: list[str] = field(default_factory=lambda: ["pub"])
    more: list[str] = field(default_factory=list)
    password: str = field(default_factory=lambda: f"hush{secrets.token_hex(6)}")

    def __post_init__(self) -> None:
        self.name = f"bad_{self.publisher.name}"
        self._fill()
        self.mend_arguments()

    def _fill(self) -> None:
        for database in (self.publisher, self.target):
            database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        self.publisher.execute(f"INSERT INTO t SELECT i, '{SECRET}' FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR TABLE t")

    def mend_arguments(self) -> None:
        self.connection, self.connect_to = self.publisher.dsn, self.target.dsn
        self.publications, self.more = ["pub"], []

    def arguments(self) -> list[str]:
        publications = [f"--publication={name}" for name in self.publications]
        return [f"--connection={self.connection}", f"--target={self.connect_to}", f"--name={self.name}", *publications, *self.more]

    def run(self, *more: str) -> Ended:
        return subscriber("run", *self.arguments(), *more)

    def check(self) -> Ended:
        return subscriber("check", *self.arguments())

    def state(self) -> dict[str, Any]:
        """Everything that an error must leave as it was."""
        found: dict[str, Any] = {"slots": slots(self.publisher), "catalog": has_catalog(self.target)}
        if self.target.value("SELECT to_regclass('t') IS NOT NULL"):
            found["rows"] = self.target.fetch("SELECT * FROM t ORDER BY 1")
        if found["catalog"]:
            for table in ("pg_subscription", "pg_subscription_rel", '"position"', "prepared_transaction", "copy_part"):
                found[table] = self.target.fetch(f"SELECT * FROM subscriber.{table} ORDER BY 1, 2")
        return found

    def secrets(self) -> list[str]:
        found = [SECRET, self.password]
        for url in (self.publisher.dsn, self.target.dsn):
            match = re.match(r"postgresql://[^:]*:([^@]+)@", url)
            assert match is not None
            found.append(match[1])
        return found

    def told(self, done: Ended, said: str, *, findings: int = 1) -> str:
        """Each error has a line of its own and a hint; the first line, which is returned, says it. No secret is shown."""
        assert (done.status, done.output) == (1, "")
        warnings = [line for line in done.errors.splitlines() if " WARNING " in line]
        lines = [line for line in done.errors.splitlines() if line not in warnings]
        assert len(lines) == findings, done.errors
        assert done.errors.endswith("\n")
        for line in lines:
            assert line.startswith("subscriber: "), line
            assert "(hint: " in line, line
        assert re.search(said, lines[0]), lines[0]
        self.keeps_quiet(done)
        return lines[0]

    def keeps_quiet(self, done: Ended) -> None:
        assert "Traceback" not in done.errors
        for secret in self.secrets():
            assert secret not in done.errors + done.output

    def goes_on(self) -> None:
        """Nothing was lost: a run is told nothing to complain of, and both hold the same."""
        self.publisher.execute(f"INSERT INTO t SELECT max(id) + 1, '{SECRET}' FROM t")
        done = self.run("--until-caught-up")
        assert (done.status, done.output, done.errors) == (0, "", "")
        assert self.target.fetch(ALL) == self.publisher.fetch(ALL)

    def move_publisher(self, **settings: str) -> EmbeddedServer:
        """The same on a server of this test's own."""
        server = self.make_server(18, **settings)
        self.publisher = self.resources.enter_context(fresh_database(ServerAddress(server.dsn(), 18), "pub"))
        self._move()
        return server

    def move_target(self, **settings: str) -> EmbeddedServer:
        """The same on a server of this test's own."""
        server = self.make_server(18, **settings)
        self.target = self.resources.enter_context(fresh_database(ServerAddress(server.dsn(), 18), "tgt"))
        self._move()
        return server

    def _move(self) -> None:
        for database in (self.publisher, self.target):
            database.execute("DROP PUBLICATION IF EXISTS pub; DROP TABLE IF EXISTS t")
        self._fill()
        self.mend_arguments()

    @contextlib.contextmanager
    def restarted(self, server: EmbeddedServer, database: Database) -> Iterator[None]:
        """Settings made in the block count from its end on."""
        yield
        database.close()
        server.restart()
        database._connection = database.connect()

    def role_on(self, database: Database, attributes: str) -> tuple[str, str]:
        """A role with a password that no message may show; its name, and the URL to connect as it."""
        name = f"r_{secrets.token_hex(4)}"
        database.execute(f"CREATE ROLE {name} LOGIN {attributes} PASSWORD '{self.password}'")

        def remove() -> None:
            database.wait(f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{name}'", 0)
            database.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")

        self.resources.callback(remove)
        return name, database.conninfo(user=name, password=self.password)
