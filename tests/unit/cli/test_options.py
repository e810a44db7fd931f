"""Arguments that several verbs share."""

from __future__ import annotations

import argparse

import pytest

from subscriber.cli.verbs import alter, check, create, run
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
