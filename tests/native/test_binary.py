"""binary = true (native's topic 014): what goes over in binary, what only as text, and what both refuse."""

from __future__ import annotations

import re

from subscriber import ApplyError, SubscriberError
from tests.native.native import Nodes
from tests.support.observation import until
from tests.support.replica import replica


async def test_types_that_are_not_the_same(nodes18: Nodes) -> None:
    """Unlike texts, bytes fit only their own type: both refuse what its receive function refuses, and continue when the type is fixed."""
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY, a int[], b bigint); CREATE TABLE u (id int PRIMARY KEY, v text)")
    nodes18.publisher.execute("INSERT INTO t VALUES (1, '{1,2}', 1), (2, '{2}', 2); CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed(binary=True) as both:
        nodes18.publisher.execute(
            "INSERT INTO t VALUES (3, '{3,NULL}', NULL), (4, '[0:1]={4,5}', 4); UPDATE t SET b = -b, a = a || 7 WHERE id < 3"
        )
        nodes18.publisher.execute("DELETE FROM t WHERE id = 1; UPDATE t SET id = 9 WHERE id = 2")
        await both.equal()
        nodes18.in_targets("ALTER TABLE t ALTER b TYPE int")
        nodes18.publisher.execute("INSERT INTO t VALUES (5, '{5}', 5); INSERT INTO u VALUES (1, 'behind it')")
        await both.both_report("incorrect binary data format in logical replication column 3", ApplyError, "incorrect binary data format")
        assert both.ours.value("SELECT count(*) FROM u") == both.native.value("SELECT count(*) FROM u") == 0
        nodes18.in_targets("ALTER TABLE t ALTER b TYPE bigint")
        await both.equal()
        # text and varchar, and domains over a type, are the same bytes
        nodes18.in_targets("CREATE DOMAIN word AS varchar(20); ALTER TABLE u ALTER v TYPE word")
        nodes18.publisher.execute("INSERT INTO u VALUES (2, 'grün'); UPDATE u SET v = v || '!'")
        await both.equal()


async def test_types_without_a_binary_form(nodes18: Nodes) -> None:
    """They cannot be copied in binary, and come as texts in the stream."""
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY, rights aclitem, n int)")
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed(binary=True, copy_data=False) as both:
        nodes18.publisher.execute("INSERT INTO t VALUES (1, makeaclitem(10, 10, 'SELECT', true), 5), (2, NULL, 6); UPDATE t SET n = 7")
        await both.equal()
        await both.assert_no_errors()


async def test_columns_in_another_order_and_more_of_them(nodes18: Nodes) -> None:
    nodes18.publisher.execute("CREATE TABLE t (id int PRIMARY KEY, v text, at timestamptz, n numeric)")
    nodes18.in_targets("CREATE TABLE t (n numeric, own text DEFAULT 'own', at timestamptz, id int PRIMARY KEY, v text)")
    nodes18.publisher.execute(
        "INSERT INTO t SELECT i, 'v', now(), i / 3.0 FROM generate_series(1, 50) AS i; CREATE PUBLICATION pub FOR TABLE t"
    )
    async with nodes18.followed(binary=True) as both:
        nodes18.publisher.execute(
            "UPDATE t SET n = 'NaN', at = '-infinity' WHERE id < 9; DELETE FROM t WHERE id = 20; INSERT INTO t VALUES (99)"
        )
        await both.equal()
        await both.assert_no_errors()


async def test_a_copy_that_neither_side_can_do(nodes18: Nodes) -> None:
    """The bug was that this program waited for ever, without a message, if publisher and target rejected the same COPY."""
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY, rights aclitem); CREATE TABLE u (id int PRIMARY KEY)")
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    # the first table that fails ends a subscription of which no other was copied: so this one comes first
    async with replica(nodes18.publisher, nodes18.ours, binary=True, copy_data=False) as first:
        await first.caught_up()
    nodes18.ours.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'i', srsublsn = NULL WHERE srrelid = 't'::regclass")
    nodes18.publisher.execute("INSERT INTO t VALUES (1, makeaclitem(10, 10, 'SELECT', true))")
    async with replica(nodes18.publisher, nodes18.ours, binary=True) as found:
        await until(lambda: isinstance(found.subscription.status.last_error, SubscriberError), "it says what is wrong")
        words = r"no binary (input|output) function available for type aclitem"
        assert re.search(words, str(found.subscription.status.last_error))
