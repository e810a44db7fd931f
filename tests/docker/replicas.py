"""One more subscription of publisher18, with a database of its own, in a container as a user would start it with ``docker run``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg import sql

from tests.docker.engine import docker, wait_until
from tests.docker.stack import PASSWORD, TARGET_PASSWORD, Container, Stack

PUBLICATION: Final = "small"
VOLUME: Final = "/var/lib/subscriber"
HARDENED: Final = ("--init", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")
_HEALTH: Final = ("--health-interval", "2s", "--health-timeout", "60s", "--health-retries", "2", "--health-start-period", "0s")


@dataclass
class Replica:
    """A subscription with its name, its slot's and its database's."""

    stack: Stack
    name: str
    connection: str = "host=publisher18 user=subscriber dbname=app"
    target: str = ""
    password: str | None = PASSWORD
    arguments: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.target = self.target or f"postgresql://subscriber@target/{self.name}"

    def create_database(self) -> None:
        """With the tables of docker/schema.sql."""
        with psycopg.connect(self.stack.dsn("target", "postgres"), autocommit=True) as target:
            target.execute(sql.SQL("CREATE DATABASE {} OWNER subscriber").format(sql.Identifier(self.name)))
        self.stack.service("target").exec("psql", "-U", "postgres", "-d", self.name, "-c", "SET ROLE subscriber", "-f", "/schema.sql")

    @property
    def _environment(self) -> list[str]:
        if self.password is None:
            return []
        target = TARGET_PASSWORD if self.password == PASSWORD else self.password
        return ["--env", f"SUBSCRIBER_PUBLISHER_PASSWORD={self.password}", "--env", f"SUBSCRIBER_TARGET_PASSWORD={target}"]

    @property
    def _asked(self) -> list[str]:
        return [f"--connection={self.connection}", f"--target={self.target}", f"--name={self.name}"]

    def start(self, *options: str) -> Container:
        """``docker run`` with a health check, and more options of it."""
        check = shlex.join(["python", "/opt/subscriber/healthcheck.py", *self._asked])
        if not self.target.startswith("postgresql:"):
            check = shlex.join(["subscriber", "status", "--target", self.target, "--check"])
        words = [*HARDENED, "--health-cmd", check, *_HEALTH, *self._environment, *self.options, *options]
        return self.stack.run(*words, self.stack.image, "run", *self._asked, f"--publication={PUBLICATION}", *self.arguments)

    def check(self) -> str:
        """What the health check prints in a container of its own. It must find a fault."""
        words = ["--entrypoint", "python", *self._environment, self.stack.image, "/opt/subscriber/healthcheck.py", *self._asked]
        return docker("run", "--rm", "--network", self.stack.network, *words, check=False, merge=True).strip()

    def change(self, factor: int = 2) -> None:
        """A change of many rows on the publisher."""
        with psycopg.connect(self.stack.publisher_dsn(18), autocommit=True) as publisher:
            publisher.execute("UPDATE accounts SET balance = balance + %s WHERE id <= 1000", (factor,))

    def assert_equal(self) -> None:
        """Wait until all is durable, and compare the rows of ``accounts``."""
        self.stack.wait_for_all(18, slot=self.name)
        query = "SELECT count(*), sum(balance), sum(id * balance) FROM accounts"
        with psycopg.connect(self.stack.publisher_dsn(18)) as publisher, psycopg.connect(self.stack.dsn("target", self.name)) as target:
            assert target.execute(query).fetchone() == publisher.execute(query).fetchone()


def wait_for_server(server: Container) -> None:
    """Wait until a container of the postgres image has run its init scripts and listens."""
    wait_until(
        lambda: (
            server.state["Running"] and "accepting" in server.exec("pg_isready", "--host=127.0.0.1", "--username=postgres", check=False)
        ),
        lambda: f"the server does not answer: {server.logs}",
    )
