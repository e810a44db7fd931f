"""A project of docker/compose.yaml that runs: its containers, what they say, and what is in their databases."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final, Self

import psycopg
from psycopg import sql

from subscriber.interfaces import TableName
from subscriber.testing.comparison import compare, compare_prepared, published_tables
from subscriber.testing.load.mixed_load import MixedLoad
from subscriber.testing.load.tables import create_tables, table_names
from subscriber.testing.ports import free_port
from tests.docker.engine import LABEL, PROJECT, ROOT, compose_command, docker, inspect, run, wait_until
from tests.docker.images import VERSIONS

PASSWORD: Final = "pass word'$x"  # the init scripts must quote it
TARGET_PASSWORD: Final = f"{PASSWORD} of the target"
FILE: Final = ROOT / "docker" / "compose.yaml"
ROWS: Final = 2_000


class Container:
    """A container that runs, or ran."""

    def __init__(self, identity: str) -> None:
        self.identity = identity

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = inspect("container", self.identity)["State"]
        return found

    @property
    def logs(self) -> str:
        """Both outputs, with the standard error of every start."""
        return docker("logs", self.identity, "--tail", "200", merge=True)

    def exec(self, *words: str, check: bool = True) -> str:
        return docker("exec", self.identity, *words, check=check)

    def python(self, program: str) -> str:
        """Run Python in it: our image has no shell tools that it needs not."""
        return self.exec("python", "-c", program).strip()

    def stop(self) -> int:
        """Stop it as Compose does, with the grace period of half a minute. Its exit status."""
        docker("stop", "--time", "30", self.identity)
        return int(self.state["ExitCode"])

    def kill(self) -> None:
        docker("kill", "--signal", "KILL", self.identity)
        wait_until(lambda: not self.state["Running"], lambda: "it runs after SIGKILL")

    def start(self) -> None:
        docker("start", self.identity)

    def health(self) -> tuple[str, str]:
        """The engine's word for it, and what the last check printed."""
        found = self.state["Health"]
        return str(found["Status"]), found["Log"][-1]["Output"].strip() if found["Log"] else ""

    def wait_for_health(self, expected: str, seconds: float = 300) -> str:
        """Wait for ``healthy`` or ``unhealthy``, and return what the check printed."""
        wait_until(
            lambda: self.health()[0] == expected, lambda: f"health is {self.health()}, not {expected}; log: {self.logs[-2000:]}", seconds
        )
        return self.health()[1]

    def wait_for_check(self, text: str, seconds: float = 300) -> None:
        """Wait until a check prints this."""
        wait_until(
            lambda: text in self.health()[1],
            lambda: f"the check prints {self.health()[1]!r}, not {text!r}; log: {self.logs[-2000:]}",
            seconds,
        )

    def wait_for_end(self, seconds: float = 300) -> int:
        """Its exit status."""
        wait_until(lambda: not self.state["Running"], lambda: f"it still runs; log: {self.logs[-2000:]}", seconds)
        return int(self.state["ExitCode"])

    def wait_for_log(self, text: str, seconds: float = 300) -> None:
        wait_until(lambda: text in self.logs, lambda: f"its log lacks {text!r}: {self.logs[-2000:]}", seconds)

    def remove(self) -> None:
        docker("container", "rm", "--force", "--volumes", self.identity)


class Stack:
    """The services of docker/compose.yaml. As a context manager it is removed at the end, with its volumes.

    Args:
        image: of the subscriptions.
    """

    def __init__(self, image: str) -> None:
        self.image = image
        self._words = compose_command()
        # the same after a restart, which a port that the engine chooses would not be
        self._ports = {f"publisher{version}": free_port() for version in VERSIONS} | {"target": free_port()}
        self._extra: list[Container] = []
        self._volumes: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_extra()
        self.compose("--profile", "*", "down", "--volumes", "--timeout", "1")

    def compose(self, *words: str) -> str:
        """Run Docker Compose on the project."""
        ports = {f"{service.upper()}_PORT": str(port) for service, port in self._ports.items()}
        passwords = {"POSTGRES_PASSWORD": PASSWORD, "PUBLISHER_PASSWORD": PASSWORD, "TARGET_PASSWORD": TARGET_PASSWORD}
        env = os.environ | ports | passwords | {"SUBSCRIBER_IMAGE": self.image}
        return run(*self._words, "--project-name", PROJECT, "--file", FILE, *words, timeout=600, env=env)

    def up(self, *services: str) -> None:
        """Start services with what they need, and wait until they are healthy."""
        self.compose("--profile", "*", "up", "--wait", "--wait-timeout", "500", "--no-build", *services)

    def start(self, version: int) -> None:
        """Start the publisher, the target and the subscription of a version, with the tables of the mixed load."""
        self.up("target", f"publisher{version}")
        self.add_load_tables(version)
        self.up(f"subscription{version}")

    def remove(self, version: int) -> None:
        """Remove the containers of a publisher and its subscription. The publisher's volume stays."""
        self.compose("--profile", "*", "rm", "--stop", "--force", "--volumes", f"publisher{version}", f"subscription{version}")

    def service(self, name: str) -> Container:
        found = self.compose("--profile", "*", "ps", "--all", "--quiet", name).strip()
        assert found, f"{name} has no container"
        return Container(found)

    @property
    def network(self) -> str:
        return f"{PROJECT}_default"

    def volume(self, *options: str) -> str:
        """A volume that is removed with the extra containers."""
        name = docker("volume", "create", "--label", LABEL, *options).strip()
        self._volumes.append(name)
        return name

    def run(self, *words: str) -> Container:
        """One more container in the network, as ``docker run`` starts it. See :meth:`remove_extra`."""
        container = Container(docker("run", "--detach", "--label", LABEL, "--network", self.network, *words).strip())
        self._extra.append(container)
        return container

    def remove_extra(self) -> None:
        """Remove the containers and volumes that are not services of the file."""
        while self._extra:
            self._extra.pop().remove()
        while self._volumes:
            docker("volume", "rm", self._volumes.pop())

    def dsn(self, service: str, dbname: str, user: str = "postgres") -> str:
        """How this machine reaches a server."""
        password = TARGET_PASSWORD if (service, user) == ("target", "subscriber") else PASSWORD
        return psycopg.conninfo.make_conninfo("", host="127.0.0.1", port=self._ports[service], user=user, password=password, dbname=dbname)

    def publisher_dsn(self, version: int) -> str:
        return self.dsn(f"publisher{version}", "app")

    def target_dsn(self, version: int, user: str = "postgres") -> str:
        return self.dsn("target", f"from{version}", user)

    def add_load_tables(self, version: int) -> None:
        """Create the tables of the mixed load on both sides, and add them to the publication. Before the subscription starts."""
        asyncio.run(create_tables(self.publisher_dsn(version), rows=ROWS))
        with psycopg.connect(self.publisher_dsn(version), autocommit=True) as publisher:
            tables = sql.SQL(", ").join(sql.Identifier(name.namespace, name.name) for name in table_names("load"))
            publisher.execute(sql.SQL("ALTER PUBLICATION app ADD TABLE {}").format(tables))
            publisher.execute("GRANT USAGE ON SCHEMA load TO subscriber")
            publisher.execute("GRANT SELECT ON ALL TABLES IN SCHEMA load TO subscriber")
        with psycopg.connect(self.target_dsn(version), autocommit=True) as target:
            target.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO subscriber").format(sql.Identifier(f"from{version}")))
        asyncio.run(create_tables(self.target_dsn(version, "subscriber")))

    def load(self, version: int, *, seed: int = 1) -> MixedLoad:
        """A mixed load that goes on after the publisher was away."""
        return MixedLoad(self.publisher_dsn(version), seed=seed, sessions=2, huge_rows=4_000, reconnect=True)

    def wait_for_all(self, version: int, slot: str | None = None, seconds: float = 300) -> None:
        """Wait until all that is committed now is durable in the target."""
        with psycopg.connect(self.publisher_dsn(version), autocommit=True) as publisher:
            row = publisher.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
            assert row is not None
            name = slot or f"from{version}"

            def confirmed() -> bool:
                query = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
                return publisher.execute(query, (row[0], name)).fetchone() == (True,)

            wait_until(confirmed, lambda: f"slot {name} does not reach {row[0]}", seconds)

    def assert_equal(self, version: int, dbname: str | None = None) -> list[TableName]:
        """Wait until the target has everything, and compare all published tables. Returns their names."""
        self.wait_for_all(version, slot=dbname)
        target = self.dsn("target", dbname or f"from{version}")

        async def found() -> tuple[list[TableName], list[str]]:
            publisher = self.publisher_dsn(version)
            tables = await published_tables(publisher, ["app"])
            different = [str(comparison) for comparison in await compare(publisher, target, tables) if not comparison.equal]
            prepared = await compare_prepared(publisher, target)
            return tables, different if prepared.equal or version < 15 else [*different, str(prepared)]

        tables, different = asyncio.run(found())
        assert not different
        return tables
