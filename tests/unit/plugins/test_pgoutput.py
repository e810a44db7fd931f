"""``pgoutput`` fed from captured pgoutput writes the same bytes."""

from __future__ import annotations

import pytest

from subscriber.errors import ConfigurationError
from subscriber.plugins.context import LogicalDecodingContext, Record
from subscriber.plugins.feed import PluginFeed
from subscriber.plugins.pgoutput import PgOutput
from subscriber.protocol.capabilities import capabilities
from tests.unit.protocol.test_golden import SCENARIOS, Options, decoded, read


@pytest.mark.parametrize(("version", "name", "options"), SCENARIOS)
def test_the_same_bytes(version: int, name: str, options: Options) -> None:
    written: list[Record] = []
    given = {option: value for option, value in options.items() if option not in {"binary", "origin", "publication_names"}}
    feed = PluginFeed(
        PgOutput(),
        LogicalDecodingContext(
            "pgoutput",
            given,
            capabilities=capabilities(version * 10000),
            writer=written.append,
            streaming="streaming" in options,
            two_phase="two_phase" in options,
        ),
    )
    feed.start()
    for message in decoded(version, name):
        feed.message(message)
    assert [record.data for record in written] == read(version, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proto_version": "5"}, 'invalid proto_version "5"'),
        ({"proto_version": None}, "invalid proto_version"),
        ({"proto_version": "1", "streaming": "on"}, "requested proto_version=1 does not support streaming, need 2"),
        ({"proto_version": "3", "streaming": "parallel"}, "need 4"),
        ({"proto_version": "2", "two_phase": "on"}, "does not support two-phase commit, need 3"),
        ({"streaming": "on"}, "transactions in progress"),
        ({"two_phase": "on"}, "prepared transactions"),
        ({"origin": "some"}, "unrecognized origin value"),
        ({"binary": "on"}, 'option "binary" = "on" is unknown'),
    ],
)
def test_wrong_options(options: dict[str, str | None], message: str) -> None:
    feed = PluginFeed(PgOutput(), LogicalDecodingContext("pgoutput", options, capabilities=capabilities(180000), writer=print))
    with pytest.raises(ConfigurationError, match=message):
        feed.start()
