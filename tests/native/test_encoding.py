"""Databases in different encodings (native's topic 005)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from subscriber import ApplyError
from tests.conftest import Servers
from tests.native.conftest import target_server_of
from tests.native.native import Nodes
from tests.support.database import ServerAddress, fresh_database

MakeNodes = Callable[[str, str], Nodes]


@pytest.fixture
def nodes_in_encodings(servers: Servers, publisher18: ServerAddress) -> Iterator[MakeNodes]:
    """Databases in these encodings: the publisher, and both targets."""
    with ExitStack() as stack:

        def make(publisher: str, targets: str) -> Nodes:
            server = target_server_of(servers, 18)
            address = ServerAddress(server.dsn(), 18)
            options = "TEMPLATE template0 ENCODING '{}'"
            here = stack.enter_context(fresh_database(publisher18, "pub", options.format(publisher)))
            native = stack.enter_context(fresh_database(address, "nat", options.format(targets)))
            return Nodes(here, native, stack.enter_context(fresh_database(address, "tgt", options.format(targets))), server)

        yield make


@pytest.mark.parametrize(
    ("publisher", "targets"),
    [("LATIN1", "UTF8"), ("UTF8", "LATIN1"), pytest.param("LATIN1", "LATIN1", marks=pytest.mark.endurance), ("EUC_JP", "UTF8")],
)
async def test_texts_and_names(nodes_in_encodings: MakeNodes, publisher: str, targets: str) -> None:
    word, other = ("日本", "名前") if publisher == "EUC_JP" else ("Grüße", "él")
    nodes = nodes_in_encodings(publisher, targets)
    nodes.everywhere(f'CREATE TABLE "{other}" (id int PRIMARY KEY, "{word}" text); ALTER TABLE "{other}" REPLICA IDENTITY FULL')
    nodes.everywhere(
        f"CREATE TABLE k (v text PRIMARY KEY); CREATE TYPE e AS ENUM ('{word}', 'x'); CREATE TABLE m (id int PRIMARY KEY, e e)"
    )
    nodes.publisher.execute(f"INSERT INTO \"{other}\" VALUES (1, '{word}'), (2, '{other}'); INSERT INTO k VALUES ('{word}')")
    nodes.publisher.execute(f"INSERT INTO m VALUES (1, '{word}'); CREATE PUBLICATION \"p {word}\" FOR ALL TABLES")
    async with nodes.followed(f"p {word}") as both:
        await both.equal()
        nodes.publisher.execute(
            f'INSERT INTO "{other}" VALUES (3, \'{word}{other}\'); UPDATE "{other}" SET "{word}" = \'{other}\' WHERE id = 1'
        )
        nodes.publisher.execute(
            f"DELETE FROM \"{other}\" WHERE id = 2; UPDATE k SET v = '{other}'; UPDATE m SET e = 'x'; UPDATE m SET e = '{word}'"
        )
        await both.equal()
        assert await both.rows(f'SELECT "{word}" FROM "{other}" ORDER BY id') == [(other,), (word + other,)]
        assert await both.rows("SELECT v FROM k") == [(other,)]
        await both.assert_no_errors()


async def test_character_that_the_target_has_not(nodes_in_encodings: MakeNodes) -> None:
    nodes = nodes_in_encodings("UTF8", "LATIN1")
    nodes.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    nodes.publisher.execute("INSERT INTO t VALUES (1, 'a'); CREATE PUBLICATION pub FOR TABLE t")
    async with nodes.followed() as both:
        nodes.publisher.execute("INSERT INTO t VALUES (2, '日'); DELETE FROM t WHERE id = 2; INSERT INTO t VALUES (3, 'ü')")
        native = 'character with byte sequence 0xe6 0x97 0xa5 in encoding "UTF8" has no equivalent in encoding "LATIN1"'
        await both.both_report(native, ApplyError, "untranslatable character")
        assert both.ours.value("SELECT count(*) FROM t") == both.native.value("SELECT count(*) FROM t") == 1
