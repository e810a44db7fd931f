"""Every code block of README and docs is run, with the servers of this test in the places of those that it names.

The blocks of a tutorial are run one after another, as a reader does it. A text block behind a Python block is what that block prints.

All other blocks are run by themselves. Python blocks have a function each, SQL blocks run on the publisher. Each command of a shell block
is run by the function of its program. If that is not possible here, the function says why, and checks what it can. A block without a
function fails. Commands in text blocks, systemd units and Kubernetes manifests are parsed.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import metadata
from pathlib import Path
from typing import IO, Any

import psycopg
import pytest
import yaml

from subscriber import Subscription, Until
from subscriber.cli.main import main
from subscriber.cli.parser import make_parser
from subscriber.testing.binaries import find_binaries
from subscriber.testing.compliance import SCENARIOS
from subscriber.testing.ports import free_port
from tests.benchmark.pytest_fixtures import plugin_arguments
from tests.sinks.test_own_sink import own_sink
from tests.support.code_blocks import ROOT, Block, blocks
from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import environment, running

ACTIVE = "SELECT count(*) FROM pg_replication_slots WHERE active AND NOT temporary AND database = current_database()"
FOLLOWED = "SELECT count(*) FROM pg_stat_replication WHERE application_name = '{}' AND state = 'streaming'"


@dataclass
class PageSetup:
    """The databases and files that the pages name, in the places that they have in this test.

    Attributes:
        publisher: ``app`` on ``db1``.
        target: ``copy`` on ``db2``.
        directory: of files.
        port: of metrics.
        defined: a block has created or run a subscription.
    """

    publisher: Database
    target: Database
    directory: Path
    port: int = field(default_factory=free_port)
    defined: bool = False

    def fill(self) -> None:
        """Table ``accounts`` with a row in publication ``app``, and empty in the target."""
        for database in (self.publisher, self.target):
            database.execute("CREATE TABLE accounts (id int PRIMARY KEY, balance int)")
        self.publisher.execute("INSERT INTO accounts VALUES (1, 100); CREATE PUBLICATION app FOR TABLE accounts; CREATE PUBLICATION more")

    def filled(self, text: str) -> str:
        """With real addresses in the places of those that the pages name."""
        for name, real in (
            ("host=db1 dbname=app user=replicator", self.publisher.conninfo()),
            ("host=db1 dbname=app", self.publisher.conninfo()),
            ("postgresql://db1/app", self.publisher.dsn),
            ("postgresql://db2/copy", self.target.dsn),
            ("sqlite:///copy.db", f"sqlite:///{self.directory}/copy.db"),
            ("app.rec", f"{self.directory}/app.rec"),
            ("/var/lib/lake", f"{self.directory}/lake"),
            ("/mnt/lake", f"{self.directory}/lake"),
            ("/var/lib/subscriber/relay", f"{self.directory}/relay"),
            ("./switch.sh", "true"),
            ("127.0.0.1:9187", f"127.0.0.1:{self.port}"),
        ):
            text = text.replace(name, real)
        return text


@pytest.fixture
def page_setup(publisher18_db: Database, target_db: Database, tmp_path: Path) -> PageSetup:
    setup = PageSetup(publisher18_db, target_db, tmp_path)
    setup.fill()
    return setup


# --- programs of shell blocks


def run_subscriber(words: list[str], page_setup: PageSetup) -> None:
    words = [page_setup.filled(word) for word in words[1:]]
    if words == ["--help"]:
        return
    parsed = make_parser().parse_args(words)
    verb = words[0]
    if verb == "spark-apply":
        # Spark is half a gigabyte: the same lake without it
        if not (page_setup.directory / "lake").exists():
            assert (
                main(
                    [
                        "run",
                        f"--connection={page_setup.publisher.dsn}",
                        "--publication=app",
                        f"--target=spark://{page_setup.directory}/lake",
                        "--until-caught-up",
                    ]
                )
                == 0
            )
        assert main(["spark-apply", parsed.lake, "--engine=local", "--once"]) == 0
    elif "mariadb://" in getattr(parsed, "target", ""):
        return  # tests/integration/sqlalchemy/test_run.py starts a MariaDB
    elif "plugin:" in getattr(parsed, "target", ""):
        return  # tests/integration/cli/test_run_plugin.py starts a server for it
    elif verb == "cutover":
        run_cutover(words, page_setup)
    elif verb == "verify" and parsed.target.startswith("spark:"):
        lake = [f"--connection={page_setup.publisher.dsn}", "--publication=app", f"--target={parsed.target}?apply=local"]
        with running("run", *lake, loud=True) as both:
            page_setup.publisher.wait(ACTIVE, 1)
            assert main(["--quiet", *words]) == 0
            both.send(15)
            assert both.ended().status == 0
    elif verb == "verify":
        definition = [f"--connection={page_setup.publisher.dsn}", "--publication=app", f"--target={parsed.target}"]
        if not page_setup.defined:
            run_subscriber(["subscriber", "create", parsed.name, *definition], page_setup)
        with running("run", f"--target={parsed.target}", loud=True) as launcher:
            page_setup.target.wait("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 1)
            assert main(["--quiet", *words]) == 0
            launcher.send(15)
            assert launcher.ended().status == 0
    elif verb == "migrate":
        assert main(["--quiet", *words, "--bindir", str(find_binaries(18)), "--until-ready"]) == 0
        page_setup.defined = True
    elif verb == "schema":
        if words[1] == "diff" and not page_setup.defined:
            run_subscriber(["subscriber", "create", "move", *words[words.index("--target") :]], page_setup)
        # `pg_dump` of this machine may be too old
        assert main(["--quiet", *words, *(["--bindir", str(find_binaries(18))] if words[1] == "copy" else [])]) == 0
    elif verb in {"alter", "drop", "recover", "sequences", "status"} and not page_setup.defined:
        run_subscriber(
            [
                "subscriber",
                "create",
                next((name for name in ("move", "lake") if name in words), "copy"),
                f"--connection={page_setup.publisher.dsn}",
                "--publication=app",
                f"--target={parsed.target}",
            ],
            page_setup,
        )
        run_subscriber(["subscriber", *words], page_setup)
    elif verb == "recover":
        with running("run", f"--target={parsed.target}", loud=True) as launcher:
            page_setup.target.wait("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 1)
            launcher.send(15)
            assert launcher.ended().status == 0
        page_setup.publisher.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
        )
        assert main(["--quiet", *words]) == 0
    elif verb == "run" and parsed.connection is None and not page_setup.defined:
        definition = [f"--connection={page_setup.publisher.dsn}", "--publication=app", f"--target={parsed.target}"]
        run_subscriber(["subscriber", "create", "copy", *definition], page_setup)
        run_subscriber(["subscriber", *words], page_setup)
    elif verb == "run" and parsed.connection is None:
        with running("-v", *words) as launcher:
            launcher.says("starting subscription")
            launcher.send(15)
            assert launcher.ended().status == 0
    else:
        more = ["--until-caught-up"] if verb in {"run", "tail"} and "--until-caught-up" not in words else []
        # a monitoring plugin: CRITICAL, because no process runs the subscription here
        assert main(["--quiet", *words, *more]) == (2 if "--check" in words else 0)
        page_setup.defined |= verb in {"create", "run"}


def run_cutover(words: list[str], page_setup: PageSetup) -> None:
    target = f"--target={page_setup.target.dsn}"
    if "--pool" in words:
        # tests/integration/subscription/test_cutover_pool.py starts a PgBouncer
        del words[words.index("--pool") : words.index("--pool") + 2]
    if not page_setup.defined:
        run_subscriber(
            ["subscriber", "create", "move", f"--connection={page_setup.publisher.dsn}", "--publication=app", target], page_setup
        )
    with running("run", target, loud=True) as launcher:
        page_setup.target.wait("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 1)
        done = page_setup.publisher.value("SELECT to_regclass('subscriber.fence') IS NOT NULL")
        if {"--rollback", "--complete"} & set(words) and not done:
            assert main(["--quiet", "cutover", "move", target]) == 0
        assert main(["--quiet", *words]) == 0
        launcher.send(15)
        assert launcher.ended().status == 0
    # a cutover ends the sessions
    page_setup.publisher.reconnect()
    page_setup.target.reconnect()


def run_psql(words: list[str], page_setup: PageSetup) -> None:
    command = " ".join(word if word == "|" else shlex.quote(page_setup.filled(word)) for word in words)
    env = {**environment(), "PATH": f"{find_binaries(18)}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def run_pg_dump(words: list[str], page_setup: PageSetup) -> None:
    page_setup.target.execute("DROP TABLE IF EXISTS accounts")
    run_psql(words, page_setup)
    assert page_setup.target.value("SELECT count(*) FROM accounts") == 0
    assert page_setup.target.fetch("SELECT pubname FROM pg_publication") == []


def run_make(words: list[str], page_setup: PageSetup) -> None:
    # what it would do: the tests are running
    subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, timeout=WAIT_SECONDS, check=True)


def run_pip(words: list[str], page_setup: PageSetup) -> None:
    # nothing is installed here: the extras exist
    for extras in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(metadata("pg-subscriber").get_all("Provides-Extra") or [])


def run_docker(words: list[str], page_setup: PageSetup) -> None:
    # there is no Docker engine: the services and profiles exist, and our own arguments are right
    compose = (ROOT / "docker" / "compose.yaml").read_text()
    for name in re.findall(r"\b(?:publisher\d+|target|pg\d+)\b", " ".join(words)):
        assert name in compose
    if "run" in words and "pg-subscriber" in words:
        make_parser().parse_args(words[words.index("pg-subscriber") + 1 :])


def run_python(words: list[str], page_setup: PageSetup) -> None:
    # files are there; tests/integration/testing/test_docker.py runs the health check
    for word in words:
        if word.endswith(".py"):
            assert (ROOT / word).exists() or (ROOT / "docker" / Path(word).name).exists(), word


def run_spark_submit(words: list[str], page_setup: PageSetup) -> None:
    # tests/spark/test_cluster.py runs it
    make_parser().parse_args(words[words.index("apply.py") + 1 :])


def run_directory(words: list[str], page_setup: PageSetup) -> None:
    assert (ROOT / words[1]).is_dir() or words[1].startswith("/tmp/")


def not_run(words: list[str], page_setup: PageSetup) -> None:
    """Of the user, or a download."""


PROGRAMS: dict[str, Callable[[list[str], PageSetup], None]] = {
    "subscriber": run_subscriber,
    "pg_dump": run_pg_dump,
    "psql": run_psql,
    "make": run_make,
    "pip": run_pip,
    "docker": run_docker,
    "python": run_python,
    "spark-submit": run_spark_submit,
    "cd": run_directory,
    "switch-the-application": not_run,
    "hadolint": not_run,
    "git": not_run,
    "python3": not_run,
    "python3.13": not_run,
}


# --- Python blocks


@contextmanager
def as_module(block: Block, page_setup: PageSetup, more: str = "") -> Iterator[IO[str]]:
    """Run it in a process, until the caller is done with its output."""
    code = page_setup.filled(block.text) + more
    with subprocess.Popen([sys.executable, "-u", "-c", code], env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def in_process(block: Block, **names: Any) -> dict[str, Any]:
    """Execute it; what it defines."""
    exec(block.text, names)
    return names


def keep_a_replica(block: Block, page_setup: PageSetup) -> None:
    with as_module(block, page_setup):
        page_setup.target.wait("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL", True)
        page_setup.target.wait("SELECT count(*) FROM accounts", 1)


def audit(block: Block, page_setup: PageSetup) -> None:
    with as_module(block, page_setup, "\nimport asyncio\nasyncio.run(audit())\n") as output:
        page_setup.publisher.wait(ACTIVE, 1)
        page_setup.publisher.execute("INSERT INTO accounts VALUES (2, 7)")
        page_setup.publisher.execute("UPDATE accounts SET balance = 8 WHERE id = 2; DELETE FROM accounts WHERE id = 2")
        assert [output.readline() for _ in range(3)] == [
            "insert into accounts {'id': '2', 'balance': '7'}\n",
            "update accounts {'id': '2', 'balance': '8'}\n",
            "delete from accounts {'id': '2'}\n",
        ]


def manage(block: Block, page_setup: PageSetup) -> None:
    names: dict[str, Any] = {}
    exec(page_setup.filled(block.text), names)
    asyncio.run(names["manage"]())
    assert page_setup.publisher.value(ACTIVE) == 0


def decide_columns(block: Block, page_setup: PageSetup) -> None:
    names = in_process(block)
    assert names["settings"].schema_change is names["added"]


def define(block: Block, page_setup: PageSetup) -> None:
    # tests/unit/test_documentation.py runs it over captured streams
    in_process(block)


def is_run_elsewhere(block: Block, page_setup: PageSetup) -> None:
    # tests/integration/cli/test_run_plugin.py runs it as a target
    compile(block.text, str(block), "exec")


async def waits_for_an_lsn(block: Block, page_setup: PageSetup) -> None:
    with page_setup.publisher.connect() as publisher, page_setup.target.connect() as target:
        names = {
            "publisher": publisher,
            "target": target,
            "publisher_dsn": page_setup.publisher.dsn,
            "target_dsn": page_setup.target.dsn,
        }
        await top_level(block, names)


async def top_level(block: Block, names: dict[str, Any]) -> None:
    """Execute it as ``python -m asyncio`` does."""
    code = compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, names)


def run_pytest(text: str, page_setup: PageSetup) -> None:
    file = page_setup.directory / "test_example.py"
    file.write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(page_setup.directory),
        *plugin_arguments(),
        str(file),
    ]
    done = subprocess.run(command, cwd=page_setup.directory, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def replicate_into_own_sink(block: Block, page_setup: PageSetup) -> None:
    make = in_process(block)["JsonSink"]

    def run() -> None:
        target = make(page_setup.directory)
        asyncio.run(Subscription("replica", connection=page_setup.publisher.dsn, publications=["app"], target=target).run(Until()))

    run()
    page_setup.publisher.execute("UPDATE accounts SET balance = 7; INSERT INTO accounts VALUES (2, NULL)")
    run()
    rows = json.loads((page_setup.directory / "replica.json").read_text())["tables"]["public.accounts"]
    assert rows == [{"id": "1", "balance": "7"}, {"id": "2", "balance": None}]


def comply(block: Block, page_setup: PageSetup) -> None:
    # one scenario: tests/sinks/test_own_sink.py runs all of them
    names = in_process(block, JsonSink=own_sink()["JsonSink"])
    asyncio.run(names["test_compliance"](SCENARIOS[0], page_setup.directory))


def use_the_fake_publisher(block: Block, page_setup: PageSetup) -> None:
    asyncio.run(in_process(block)["test_changes_survive_a_lost_connection"]())


def start_a_server(block: Block, page_setup: PageSetup) -> None:
    urls: list[str] = []
    exec(compile(block.text, str(block), "exec"), {"print": urls.append, "input": lambda _: asyncio.run(answers(urls[0]))})
    assert len(urls) == 1


async def answers(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        assert await (await connection.execute("SHOW wal_level")).fetchone() == ("logical",)


def read_a_lake(block: Block, page_setup: PageSetup) -> None:
    # a session of Spark: tests/spark; what it imports is there
    imports = [
        node for node in ast.parse(block.text).body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("subscriber")
    ]
    assert imports
    exec(compile(ast.Module([*imports], []), str(block), "exec"), {})


PYTHON: dict[tuple[str, str], Callable[[Block, PageSetup], Awaitable[None] | None]] = {
    ("README.md", "wait_for(lsn"): waits_for_an_lsn,
    ("docs/howto/library.md", "asyncio.run(main())"): keep_a_replica,
    ("docs/howto/library.md", "def added("): decide_columns,
    ("docs/howto/library.md", "def manage("): manage,
    ("docs/howto/transactions.md", "def audit("): audit,
    ("docs/howto/own-connection.md", "def follow("): define,
    ("docs/howto/plugins.md", "class Webhook"): is_run_elsewhere,
    ("docs/reference/python/fake-publisher.md", "FakePublisher"): use_the_fake_publisher,
    ("docs/reference/python/testing.md", "EmbeddedServer.create("): start_a_server,
    ("docs/howto/plugins.md", "class Kafka("): is_run_elsewhere,
    ("docs/howto/own-sink.md", "class JsonSink("): replicate_into_own_sink,
    ("docs/howto/own-sink.md", "def test_compliance("): comply,
    # by tests/crash_points/test_own_sink.py
    ("docs/howto/own-sink.md", "class JsonKind"): is_run_elsewhere,
    ("docs/howto/own-sink.md", "def test_crash_points("): is_run_elsewhere,
    # by tests/integration/subscription/test_changed_columns.py
    ("docs/howto/columns.md", "class HashingSink("): is_run_elsewhere,
    ("docs/howto/lake-read.md", "import snapshot"): read_a_lake,
    ("docs/howto/lake-read.md", "postgres_changes"): read_a_lake,
    ("docs/howto/lake-read.md", "postgres_snapshot"): read_a_lake,
    ("docs/howto/lake-history.md", "accounts_history"): read_a_lake,
}

TUTORIALS = sorted({block.page for block in blocks() if block.page.startswith("docs/tutorials/")})
# by tests/docker/test_delivery.py, because it needs a container engine
RUN_ELSEWHERE = {"docs/tutorials/containers.md"}


def single_blocks(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language and block.page not in TUTORIALS]


@pytest.mark.parametrize("block", single_blocks("python"), ids=str)
async def test_python(block: Block, page_setup: PageSetup) -> None:
    runners = [run for (page, part), run in PYTHON.items() if page == block.page and part in block.text]
    assert len(runners) == 1, f"{block} has no function in PYTHON: write one"
    if asyncio.iscoroutinefunction(runners[0]):
        await runners[0](block, page_setup)
    else:
        # some of them run an event loop of their own
        await asyncio.to_thread(runners[0], block, page_setup)


@pytest.mark.parametrize("block", single_blocks("sh"), ids=str)
def test_shell(block: Block, page_setup: PageSetup) -> None:
    run_shell(block, page_setup)


def run_shell(block: Block, page_setup: PageSetup) -> None:
    for words in block.commands():
        while re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
            words.pop(0)
        program = Path(words[0]).name
        assert program in PROGRAMS, f"{block}: `{program}` has no function in PROGRAMS: write one"
        PROGRAMS[program](words, page_setup)


@pytest.mark.parametrize("block", single_blocks("sql"), ids=str)
def test_sql(block: Block, page_setup: PageSetup) -> None:
    if "CREATE PUBLICATION app" in block.text:
        page_setup.publisher.execute("DROP PUBLICATION app")
    if "subscriber.fence" in block.text:
        page_setup.target.execute("CREATE SCHEMA IF NOT EXISTS subscriber; CREATE TABLE subscriber.fence ()")
        page_setup.target.execute(block.text.replace("DATABASE copy", f'DATABASE "{page_setup.target.name}"'))
        return
    page_setup.publisher.execute(block.text)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", [page for page in TUTORIALS if page not in RUN_ELSEWHERE])
def test_tutorial(page: str, publisher18_db: Database, target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_setup = PageSetup(publisher18_db, target_db, tmp_path)
    monkeypatch.chdir(tmp_path)
    steps = [block for block in blocks() if block.page == page]
    code = [block for block in steps if block.language == "python"]
    tests = code if any("import pytest" in block.text for block in code) else []
    for block, following in zip(steps, [*steps[1:], None], strict=True):
        match block.language:
            case "sql":
                page_setup.publisher.execute(block.text)
            case "sh":
                run_shell(block, page_setup)
            case "python" if "SparkSession" in block.text:
                read_a_lake(block, page_setup)
            case "python" if not tests:
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(page_setup.filled(block.text), {})
                if following is not None and following.language == "text":
                    assert printed.getvalue() == following.text, str(following)
    if tests:
        run_pytest("\n\n".join(block.text for block in tests), page_setup)


@pytest.mark.parametrize("block", [block for block in blocks() if block.language == "text"], ids=str)
def test_commands_in_text(block: Block) -> None:
    for words in block.commands() if "\nsubscriber " in f"\n{block.text}" else ():
        if words[0] == "subscriber":
            make_parser().parse_args(words[1 : words.index(">") if ">" in words else None])


@pytest.mark.parametrize("block", [block for block in blocks() if block.language == "ini"], ids=str)
def test_unit_of_systemd(block: Block) -> None:
    (command,) = re.findall(r"^ExecStart=(.*)$", block.text.replace("\\\n", " "), re.MULTILINE)
    make_parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("block", [block for block in blocks() if "kind: Deployment" in block.text], ids=str)
def test_manifest_of_kubernetes(block: Block) -> None:
    deployment, policy = yaml.safe_load_all(block.text)
    pod = deployment["spec"]["template"]["spec"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    make_parser().parse_args(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": "metrics"}
    assert f"--http=0.0.0.0:{ports['metrics']}" in container["args"]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert "COPY docker/healthcheck.py /opt/subscriber/healthcheck.py\n" in dockerfile
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}\n" in dockerfile
    assert f"TMPDIR={container['volumeMounts'][0]['mountPath']}\n" in dockerfile
    # docker/kubernetes.yaml is this manifest; tests/docker/test_delivery.py validates it
    assert (ROOT / "docker" / "kubernetes.yaml").read_text().endswith(f"\n{block.text}")


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {block.language for block in blocks()} <= {"python", "sh", "sql", "text", "ini", "yaml", "toml", "mermaid"}
    parts = {(block.page, part) for block in blocks() for page, part in PYTHON if page == block.page and part in block.text}
    assert parts == set(PYTHON), "a function in PYTHON has no block any more"
