from __future__ import annotations

import dataclasses

import pytest

from subscriber.config import SubscriptionOptions
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.protocol.capabilities import Capabilities, capabilities, negotiate

FIRST_VERSION = {
    "wal_status": 13,
    "streaming": 14,
    "binary": 14,
    "messages": 14,
    "tid_range_scan": 14,
    "two_phase": 15,
    "slot_options_syntax": 15,
    "row_filters": 15,
    "column_lists": 15,
    "parallel_streaming": 16,
    "origin": 16,
    "binary_copy": 16,
    "conflicting": 16,
    "failover_slots": 17,
    "alter_slot": 17,
    "invalidation_reason": 17,
    "empty_prepares": 18,
    "published_sequences": 19,
}


def test_the_table_names_every_flag() -> None:
    fields = {field.name for field in dataclasses.fields(Capabilities)}
    assert fields - {"server_version", "protocol_version"} == set(FIRST_VERSION)


@pytest.mark.parametrize("flag", FIRST_VERSION)
def test_flags_begin_with_their_version(flag: str) -> None:
    for major in range(13, 20):
        for minor in (0, 23):
            assert getattr(capabilities(major * 10000 + minor), flag) is (major >= FIRST_VERSION[flag]), f"{major}.{minor}"


@pytest.mark.parametrize(
    ("version", "protocol"), [(130000, 1), (139999, 1), (140000, 2), (150018, 3), (160014, 4), (170000, 4), (180004, 4), (190000, 4)]
)
def test_protocol_version(version: int, protocol: int) -> None:
    assert capabilities(version).protocol_version == protocol


def test_newer_server_is_treated_as_19() -> None:
    newer, known = capabilities(200000), capabilities(190000)
    assert dataclasses.replace(newer, server_version=190000) == known


@pytest.mark.parametrize(("version", "text"), [(129999, "12.9999"), (120022, "12.22"), (90624, "9.6")])
def test_older_server_is_rejected(version: int, text: str) -> None:
    with pytest.raises(PublisherError, match=f"version {text} is not supported") as caught:
        capabilities(version)
    assert caught.value.hint == "upgrade the publisher to PostgreSQL 13 or later"


EVERYTHING = SubscriptionOptions(streaming="parallel", binary=True, two_phase=True, origin="none")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (13, 'proto_version=1 publication_names="p"'),
        (14, 'proto_version=2 streaming=on publication_names="p" binary=true messages=true'),
        (15, 'proto_version=3 streaming=on two_phase=on publication_names="p" binary=true messages=true'),
        (16, 'proto_version=4 streaming=parallel two_phase=on origin=none publication_names="p" binary=true messages=true'),
        (18, 'proto_version=4 streaming=parallel two_phase=on origin=none publication_names="p" binary=true messages=true'),
    ],
)
def test_all_options_by_publisher_version(version: int, expected: str) -> None:
    options = negotiate(capabilities(version * 10000), EVERYTHING, publications=["p"], two_phase=True, messages=True)
    assert " ".join(f"{name}={value}" for name, value in options.pairs()) == expected


@pytest.mark.parametrize(
    ("version", "streaming", "expected"),
    [
        (18, "off", "off"),
        (18, "on", "on"),
        (18, "parallel", "parallel"),
        (15, "off", "off"),
        (15, "parallel", "on"),
        (13, "on", "off"),
    ],
)
def test_streaming(version: int, streaming: str, expected: str) -> None:
    wanted = SubscriptionOptions.parse([f"streaming={streaming}"])
    options = negotiate(capabilities(version * 10000), wanted, publications=["p"], two_phase=False)
    assert options.streaming == expected
    assert dict(options.pairs()).get("streaming", "off") == expected


def test_minimal_options() -> None:
    options = negotiate(capabilities(180000), SubscriptionOptions(streaming="off"), publications=["p"], two_phase=False)
    # native sends origin also when it is any
    assert options.pairs() == (("proto_version", "4"), ("origin", "any"), ("publication_names", '"p"'))


def test_two_phase_option_does_not_set_the_stream_option() -> None:
    options = negotiate(capabilities(180000), SubscriptionOptions(two_phase=True), publications=["p"], two_phase=False)
    assert not options.two_phase


def test_publication_names_are_quoted_identifiers() -> None:
    names = ['a"b', "a,b", "a'b", "a\\b", "Größe", " ", "UPPER"]
    options = negotiate(capabilities(180000), SubscriptionOptions(), publications=names, two_phase=False)
    assert dict(options.pairs())["publication_names"] == '"a""b","a,b","a\'b","a\\b","Größe"," ","UPPER"'


@pytest.mark.parametrize("publications", [[], [""], ["a", "null\0"]])
def test_invalid_publication_names(publications: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        negotiate(capabilities(180000), SubscriptionOptions(), publications=publications, two_phase=False)
