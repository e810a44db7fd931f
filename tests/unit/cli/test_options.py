"""Arguments that several verbs share."""

from __future__ import annotations

import argparse

import pytest
from psycopg.conninfo import conninfo_to_dict

from subscriber.cli.options import complete_target
from subscriber.cli.parser import make_parser
from subscriber.cli.verbs import alter, check, create, drop, run
from subscriber.config import Settings
from subscriber.errors import ConfigurationError

PUBLISHER = ["--connection=host=nowhere", "--publication=p", "--target=sqlite:///x.db"]
VERBS = {
    "run": (run, PUBLISHER),
    "check": (check, PUBLISHER),
    "create": (create, ["name", *PUBLISHER]),
    "alter": (alter, ["name", "--target=sqlite:///x.db", "--refresh"]),
}


def settings(verb: str, *more: str) -> Settings:
    module, arguments = VERBS[verb]
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return Settings.parse(parser.parse_args([*arguments, *more]).settings)


@pytest.mark.parametrize("verb", VERBS)
def test_create_tables(verb: str) -> None:
    assert settings(verb).create_tables is None
    assert settings(verb, "--create-tables").create_tables is True
    assert settings(verb, "-c", "create_tables=off").create_tables is False
    both = settings(verb, "-c", "schema_change=add", "--create-tables", "-c", "new_tables=copy")
    assert (both.create_tables, both.schema_change, both.new_tables) == (True, "add", "copy")
    with pytest.raises(ConfigurationError, match='"create_tables" is given twice'):
        settings(verb, "--create-tables", "-c", "create_tables=off")
    # nothing of one call stays for the next
    assert settings(verb) == Settings()


def test_port_and_user_as_psql_takes_them() -> None:
    parser = argparse.ArgumentParser()
    drop.add_arguments(parser)

    def target(*arguments: str) -> str:
        args = parser.parse_args(["name", *arguments])
        complete_target(args)
        return str(args.target)

    assert conninfo_to_dict(target("-d", "dbname=copy user=a", "-p", "5433", "-U", "b")) == {"dbname": "copy", "user": "b", "port": "5433"}
    assert conninfo_to_dict(target("-d", "postgresql://a@db2:1/copy", "-p5433"))["port"] == "5433"
    assert target("-d", "sqlite:///x.db") == "sqlite:///x.db"
    with pytest.raises(ConfigurationError, match="-p and -U are for a PostgreSQL target"):
        target("-d", "sqlite:///x.db", "-U", "b")
    with pytest.raises(ConfigurationError, match="-p and -U need --target"):
        complete_target(argparse.Namespace(target=None, target_user="b"))


@pytest.mark.parametrize("arguments", [["user=u password=hunter2"], ["schema", "postgresql://u:hunter2@host/db"]])
def test_wrong_arguments_are_printed_without_passwords(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(arguments)
    message = capsys.readouterr().err
    assert "********" in message
    assert "hunter2" not in message
