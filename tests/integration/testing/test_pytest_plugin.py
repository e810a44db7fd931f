"""The pytest fixtures, in pytest runs of their own: with pytest-asyncio in both modes, anyio, pytest-xdist, and with nothing."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import psycopg
import pytest

from tests.benchmark.pytest_fixtures import plugin_arguments
from tests.support.database import ServerAddress

pytest_plugins = ["pytester"]

FAKE = """
async def test_fake(fake_publisher, subscription, memory_target):
    fake_publisher.create_table("accounts", {"id": "int", "balance": "numeric"}, key=["id"])
    fake_publisher.create_publication("app", "accounts")
    async with fake_publisher.transaction() as transaction:
        transaction.insert("accounts", id=1, balance="12.50")
    replica = await subscription(fake_publisher, "app")
    async with fake_publisher.transaction() as transaction:
        transaction.insert("accounts", id=2, balance=None)
    await replica.caught_up()
    assert [row["id"] for row in memory_target.rows("accounts")] == [1, 2]
    await replica.assert_equal()
"""
REAL = """
async def test_real(postgres_publisher, subscription, memory_target):
    assert postgres_publisher.fetch("SELECT id FROM accounts") == [(1,)]
    replica = await subscription(postgres_publisher, "app")
    postgres_publisher.execute("INSERT INTO accounts VALUES (2, 7)")
    await replica.assert_equal()
    assert [row["id"] for row in memory_target.rows("public.accounts")] == [1, 2]

async def test_another_database(postgres_publisher):
    # a copy of the template, without the rows of other tests
    assert postgres_publisher.fetch("SELECT id FROM accounts") == [(1,)]
"""
CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def postgres_publisher_schema():
    return '''
        CREATE TABLE accounts (id int PRIMARY KEY, balance numeric);
        INSERT INTO accounts VALUES (1, 12.50);
        CREATE PUBLICATION app FOR ALL TABLES;
    '''
"""
FAILURES = """
import asyncio
import pytest
from subscriber import SubscriberError, SubscriptionOptions

def tables(publisher):
    publisher.create_table("accounts", {"id": "int"}, key=["id"])
    publisher.create_publication("app", "accounts")

async def test_difference(fake_publisher, subscription, memory_target):
    tables(fake_publisher)
    replica = await subscription(fake_publisher, "app")
    memory_target.table("accounts").insert({"id": 7})
    with pytest.raises(AssertionError, match="0 of 0 published rows are not in the target, and 1 of its rows"):
        await replica.assert_equal()

async def test_filtered(fake_publisher, subscription, memory_target):
    tables(fake_publisher)
    replica = await subscription(fake_publisher, "app", options=SubscriptionOptions(where={"public.accounts": "id > 5"}))
    async with fake_publisher.transaction() as transaction:
        transaction.insert("accounts", id=1)
        transaction.insert("accounts", id=6)
    await replica.assert_equal("accounts")
    assert memory_target.rows("accounts") == [{"id": 6}]

async def test_no_publication(fake_publisher, subscription):
    with pytest.raises(SubscriberError, match='publication "missing" does not exist'):
        await subscription(fake_publisher, "missing")

async def test_error_that_nobody_waits_for(fake_publisher, subscription, memory_target):
    tables(fake_publisher)
    replica = await subscription(fake_publisher, "app", options=SubscriptionOptions(disable_on_error=True))
    memory_target.drop_table("accounts")
    async with fake_publisher.transaction() as transaction:
        transaction.insert("accounts", id=1)

    await asyncio.wait({replica.task}, timeout=30)
"""

SQLITE = """
import asyncio
import pytest

ended = []

@pytest.mark.asyncio
async def test_sqlite(fake_publisher, subscription, tmp_path):
    fake_publisher.create_table("accounts", {"id": "int"}, key=["id"])
    fake_publisher.create_publication("app", "accounts")
    replica = await subscription(fake_publisher, "app", target=f"sqlite:///{tmp_path}/copy.db")
    replica.task.add_done_callback(lambda task: ended.append(task.cancelled()))

def test_it_was_stopped_not_cancelled():
    assert ended == [False]
"""


def run(pytester: pytest.Pytester, *arguments: str, **settings: str) -> pytest.RunResult:
    given = {"filterwarnings": "error", **settings}
    pytester.makeini("[pytest]\n" + "".join(f"{name} = {value}\n" for name, value in given.items()))
    return pytester.runpytest_subprocess("-p", "no:randomly", *plugin_arguments(), *arguments, timeout=100)


ASYNCIO = {"asyncio_default_fixture_loop_scope": "function"}


def test_auto_mode(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(FAKE + REAL)
    run(pytester, asyncio_mode="auto", **ASYNCIO).assert_outcomes(passed=3)


def test_strict_mode_and_a_given_server(pytester: pytest.Pytester, publisher18: ServerAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBSCRIBER_TEST_DSN", publisher18.dsn())
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("import pytest\npytestmark = pytest.mark.asyncio\n" + FAKE + REAL)
    run(pytester, asyncio_mode="strict", **ASYNCIO).assert_outcomes(passed=3)
    with psycopg.connect(publisher18.dsn()) as connection:
        left = "SELECT datname FROM pg_database WHERE datname LIKE 'subscriber_%'"
        assert connection.execute(left).fetchall() == []


def test_subscriptions_stop_before_the_loop_closes(pytester: pytest.Pytester) -> None:
    # if they were cancelled with it, the driver of SQLite would print "Task was destroyed but it is pending!"
    pytester.makepyfile(SQLITE)
    result = run(pytester, "-s", "-p", "no:logging", asyncio_mode="strict", **ASYNCIO)
    result.assert_outcomes(passed=2)
    assert "destroyed" not in result.stdout.str() + result.stderr.str()


def test_anyio(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST + "\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n")
    pytester.makepyfile("import pytest\npytestmark = pytest.mark.anyio\n" + FAKE + REAL)
    run(pytester, "-p", "no:asyncio").assert_outcomes(passed=3)


def test_xdist(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_one=FAKE + REAL, test_two=FAKE + REAL)
    run(pytester, "-n", "2", asyncio_mode="auto", **ASYNCIO).assert_outcomes(passed=6)


def test_failures_are_reported(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAILURES)
    result = run(pytester, asyncio_mode="auto", **ASYNCIO)
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_error_that_nobody_waits_for*", "*RelationError*accounts*does not exist*"])


def test_other_runs_are_not_disturbed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_imported():
            heavy = {"psycopg", "asyncpg", "sqlalchemy", "pyarrow", "asyncio"}
            assert not {name for name in heavy if name in sys.modules and name != "asyncio"}
            ours = {name for name in sys.modules if name.startswith("subscriber.")}
            assert ours <= {"subscriber._implementation", "subscriber.testing", "subscriber.testing.pytest_plugin"}, ours
        """
    )
    run(pytester, "-p", "no:asyncio", "-p", "no:anyio", "-p", "no:hypothesispytest", "-W", "error").assert_outcomes(passed=1)


def test_fixtures_are_listed(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--fixtures", **ASYNCIO)
    text = result.stdout.str()
    assert result.ret == 0
    for line in (
        "postgres_publisher -- ",
        "fake_publisher -- ",
        "memory_target -- ",
        "subscription -- ",
        "A database of its own for the test, on a real PostgreSQL server that can publish.",
        "A publisher inside the test process, without PostgreSQL",
        "An empty target in memory",
        "A function that starts a subscription",
    ):
        assert line in text
    assert "no docstring available" not in text[text.index("postgres_publisher") :]
    assert "_subscriber_" not in text


@pytest.mark.slow
@pytest.mark.endurance
@pytest.mark.timeout(900)
def test_wheel_in_an_empty_project(tmp_path: Path) -> None:
    """The wheel, installed with [pytest] into a fresh virtual environment, runs the test of the tutorial."""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, root], check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    project = tmp_path / "project"
    venv.create(project / ".venv", with_pip=True)
    python = project / ".venv/bin/python"
    install = [python, "-m", "pip", "install", "-q", "--constraint", root / "constraints.txt", f"{wheel}[pytest]", "pytest-asyncio"]
    subprocess.run([str(word) for word in install], check=True, timeout=600)
    page = (root / "docs/tutorials/pytest.md").read_text()
    (source,) = [block.partition("```")[0] for block in page.split("```python\n")[1:] if "async def test_balance" in block]
    (project / "test_accounts.py").write_text(source)
    (project / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    run = subprocess.run(
        [python, "-m", "pytest", "-q", "-W", "error"], cwd=project, capture_output=True, text=True, timeout=200, check=False
    )
    assert "1 passed" in run.stdout, run.stdout + run.stderr
    listed = subprocess.run([python, "-m", "pytest", "--fixtures"], cwd=project, capture_output=True, text=True, timeout=100, check=True)
    assert "fake_publisher" in listed.stdout
    assert "postgres_publisher" in listed.stdout
