"""A new option is one field: everything else is derived from it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

import pytest

from subscriber.cli.options import add_parameters_argument
from subscriber.config import PARAMETERS, SETTINGS, Option, Settings, SubscriptionOptions, declared, reference
from subscriber.config.option import option
from subscriber.config.reading import SIZE, TIME, WHOLE, OptionType, choice
from subscriber.errors import ConfigurationError
from subscriber.sinks.postgres.catalog.schema import add_column


@dataclass(frozen=True, slots=True, kw_only=True)
class More(SubscriptionOptions):
    """With two new parameters, each declared once."""

    hue: Literal["red", "green"] = option(
        "green", choice("red", "green"), "colour of the changes", since=19, alter="always", column="subhue"
    )
    patience: int = option(7, WHOLE, "how often to ask", column="subpatience")


NEW = [each for name, each in declared(More).items() if name not in PARAMETERS]


def test_parser() -> None:
    assert More.parse(["HUE = red", "patience=3"]) == More(hue="red", patience=3)
    with pytest.raises(ConfigurationError, match=r'^unrecognized hue value: "blue"$'):
        More.parse(["hue=blue"])
    with pytest.raises(ConfigurationError, match=r'^unrecognized subscription parameter: "hue"$'):
        SubscriptionOptions.parse(["hue=red"])


def test_help() -> None:
    parser = argparse.ArgumentParser()
    add_parameters_argument(parser, declared(More), "a parameter")
    assert "  hue: colour of the changes (default: green)\n  patience: how often to ask (default: 7)" in str(parser.epilog)


def test_reference() -> None:
    rows = {row.name: row for row in reference(More)}
    assert list(rows) == [*PARAMETERS, "hue", "patience"]
    assert rows["hue"] == ("hue", "red, green", "green", "", "19 or later", "yes", "colour of the changes")
    assert rows["patience"] == ("patience", "integer", "7", "", "", "no", "how often to ask")


def test_postgres_catalog() -> None:
    columns = " ".join("".join(map(add_column, NEW)).split())
    assert "ALTER TABLE subscriber.pg_subscription ADD subhue text NOT NULL DEFAULT 'green'" in columns
    assert "GRANT SELECT (subhue) ON subscriber.pg_subscription TO PUBLIC" in columns
    assert "ADD subpatience integer NOT NULL DEFAULT '7'" in columns


# --- the declarations


@pytest.mark.parametrize("each", [*PARAMETERS.values(), *SETTINGS.values()], ids=lambda each: each.name)
def test_a_shown_default_can_be_given_as_text(each: Option) -> None:
    if each.default is not None:
        assert each.type.parse(each.name, each.shown_default) == each.default
    assert len(each.help) < 120
    assert each.help[0].islower() or each.help.startswith("INSERT")
    assert not each.help.endswith(".")


def test_reference_of_settings() -> None:
    rows = {row.name: row for row in reference(Settings)}
    assert rows["wal_receiver_timeout"][1:4] == ("time", "1min", "ms")
    assert rows["copy_range_size"][1:4] == ("size", "256MB", "kB")
    assert rows["batch_delay"].default == "0"
    assert rows["new_tables"].type == "ignore, copy"


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [(TIME, 0.1, "100ms"), (TIME, 1.5, "1500ms"), (TIME, 90.0, "90s"), (TIME, 120.0, "2min"), (TIME, 0.0, "0"), (SIZE, 1536, "1536B")],
)
def test_values_are_shown_in_the_largest_unit(kind: OptionType, value: float, shown: str) -> None:
    assert kind.show(value) == shown
    assert kind.parse("", shown) == pytest.approx(value)
