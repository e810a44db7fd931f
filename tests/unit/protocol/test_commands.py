from __future__ import annotations

import pytest

from subscriber.config import SubscriptionOptions
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.protocol import commands
from subscriber.protocol.capabilities import capabilities, negotiate
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.quoting import quote_identifier, quote_literal, quote_string

PG13, PG14, PG15, PG16, PG17, PG18 = (capabilities(major * 10000) for major in range(13, 19))


def test_commands_without_options() -> None:
    assert commands.identify_system() == "IDENTIFY_SYSTEM"
    assert commands.timeline_history(3) == "TIMELINE_HISTORY 3"
    assert commands.show("wal_sender_timeout") == "SHOW wal_sender_timeout"
    assert commands.show("my.parameter") == "SHOW my.parameter"
    assert commands.drop_replication_slot("s") == 'DROP_REPLICATION_SLOT "s"'
    assert commands.drop_replication_slot("s", wait=True) == 'DROP_REPLICATION_SLOT "s" WAIT'


def test_create_replication_slot_by_version() -> None:
    create = commands.create_replication_slot
    assert create(PG13, "s") == 'CREATE_REPLICATION_SLOT "s" LOGICAL pgoutput NOEXPORT_SNAPSHOT'
    assert create(PG14, "s", snapshot="use") == 'CREATE_REPLICATION_SLOT "s" LOGICAL pgoutput USE_SNAPSHOT'
    assert create(PG14, "s", snapshot="export", temporary=True) == 'CREATE_REPLICATION_SLOT "s" TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT'
    assert create(PG15, "s") == "CREATE_REPLICATION_SLOT \"s\" LOGICAL pgoutput (SNAPSHOT 'nothing')"
    assert create(PG15, "s", two_phase=True) == "CREATE_REPLICATION_SLOT \"s\" LOGICAL pgoutput (TWO_PHASE, SNAPSHOT 'nothing')"
    assert (
        create(PG17, "s", snapshot="export", two_phase=True, failover=True, temporary=True)
        == "CREATE_REPLICATION_SLOT \"s\" TEMPORARY LOGICAL pgoutput (TWO_PHASE, FAILOVER, SNAPSHOT 'export')"
    )


def test_slot_options_that_need_a_newer_publisher() -> None:
    with pytest.raises(PublisherError, match="two-phase") as caught:
        commands.create_replication_slot(PG14, "s", two_phase=True)
    assert caught.value.hint == "two_phase needs PostgreSQL 15 or later there"
    with pytest.raises(PublisherError, match="failover"):
        commands.create_replication_slot(PG16, "s", failover=True)


def test_alter_replication_slot() -> None:
    alter = commands.alter_replication_slot
    assert alter(PG17, "s", failover=True) == 'ALTER_REPLICATION_SLOT "s" (FAILOVER true)'
    assert alter(PG18, "s", failover=False, two_phase=True) == 'ALTER_REPLICATION_SLOT "s" (FAILOVER false, TWO_PHASE true)'
    assert alter(PG18, "s", two_phase=False) == 'ALTER_REPLICATION_SLOT "s" (TWO_PHASE false)'
    with pytest.raises(PublisherError, match='too old to change "failover"'):
        alter(PG16, "s", failover=True)
    with pytest.raises(PublisherError, match='too old to change "two_phase"'):
        alter(PG17, "s", two_phase=True)
    with pytest.raises(ConfigurationError, match="nothing to change"):
        alter(PG18, "s")


def test_start_replication() -> None:
    options = negotiate(PG18, SubscriptionOptions(binary=True), publications=["p", 'it\'s "q"'], two_phase=True, messages=True)
    assert commands.start_replication("s", Lsn.parse("16/B374D848"), options) == (
        "START_REPLICATION SLOT \"s\" LOGICAL 16/B374D848 (proto_version '4', streaming 'parallel', two_phase 'on', origin 'any', "
        "publication_names '\"p\",\"it''s \"\"q\"\"\"', binary 'true', messages 'true')"
    )


@pytest.mark.parametrize("name", ["", "Upper", "with-dash", 'quo"te', "a" * 64, "ü", "a b", "a\n"])
def test_invalid_slot_names(name: str) -> None:
    options = negotiate(PG18, SubscriptionOptions(), publications=["p"], two_phase=False)
    refused = pytest.raises(ConfigurationError, match="replication slot name")
    with refused:
        commands.create_replication_slot(PG18, name)
    with refused:
        commands.drop_replication_slot(name)
    with refused:
        commands.alter_replication_slot(PG18, name, failover=True)
    with refused:
        commands.start_replication(name, Lsn(0), options)


@pytest.mark.parametrize("name", ["", "a b", "a;b", "'a'", "a.b.c", "1a"])
def test_show_takes_parameter_names_only(name: str) -> None:
    with pytest.raises(ConfigurationError, match="run-time parameter"):
        commands.show(name)


@pytest.mark.parametrize("timeline", [0, -1, 2**32])
def test_timeline_history_takes_timelines_only(timeline: int) -> None:
    with pytest.raises(ConfigurationError, match="not a timeline"):
        commands.timeline_history(timeline)


def test_quoting() -> None:
    assert quote_identifier('a"b') == '"a""b"'
    assert quote_string("it's \\") == "'it''s \\'"
    assert quote_literal("it's") == "'it''s'"
    assert quote_literal("it's \\") == "E'it''s \\\\'"
    assert quote_literal("") == "''"
    for wrong in ("", "a\0b"):
        with pytest.raises(ConfigurationError):
            quote_identifier(wrong)
    with pytest.raises(ConfigurationError):
        quote_literal("a\0b")
