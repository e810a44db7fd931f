"""The identity of rows on the publisher, and which identities the target can use. Rows without identity can only be inserted."""

from __future__ import annotations

from subscriber.errors import RelationError
from subscriber.protocol.messages import Message
from subscriber.testing.compliance.assertions import demand, equal, refused
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.sample_messages import UNSENT, Table
from subscriber.testing.compliance.scenarios import Scenarios

__all__ = ["scenarios"]

scenarios = Scenarios("identities")

_PREREQUISITE = "55000"


async def _cannot_be_changed(feed: Feed, t: Table) -> None:
    """Rows are inserted. An update or delete is rejected and rolled back. After another description of the relation the sink resumes."""
    done = await feed.apply(t.relation, t.insert(1, "a"))
    for change in (t.update(1, "b"), t.delete(None, None)):
        with refused(RelationError, "an update or delete of a row without identity", sqlstate=_PREREQUISITE) as caught:
            await feed.apply(t.insert(2, "b"), change)
        demand("public.t" in caught.error.one_line(), f"the error does not name the relation: {caught.error.one_line()}")
        await feed.expect(t, (1, "a"))
    equal(await feed.position(), done.end_lsn, "the stored position")
    whole = Table("t", "id int4", "code", full=True)
    await feed.describe(whole)
    await feed.apply(whole.relation, whole.insert(2, "b"), whole.update(3, "c", old=(2, "b")), whole.delete(1, "a"))
    await feed.expect(t, (3, "c"))


@scenarios.needing("given_tables")
async def no_key(feed: Feed) -> None:
    """A table without a key on the publisher, but with one in the target."""
    await feed.create(Table("t", "*id int4", "code"))
    t = Table("t", "id int4", "code")
    await feed.describe(t)
    await _cannot_be_changed(feed, t)


@scenarios
async def no_key_anywhere(feed: Feed) -> None:
    """A table without a key on both sides."""
    t = Table("t", "id int4", "code")
    await feed.create(t)
    await _cannot_be_changed(feed, t)


@scenarios
async def nothing(feed: Feed) -> None:
    """REPLICA IDENTITY NOTHING: both sides have the key, but it is not sent."""
    t = Table("t", "*id int4", "code", nothing=True)
    await feed.create(t)
    await _cannot_be_changed(feed, t)


@scenarios.needing("given_tables")
async def identity_of_other_columns(feed: Feed) -> None:
    """The publisher's identity is other columns than the target's key."""
    await feed.create(Table("t", "*id int4", "code"))
    t = Table("t", "id int4", "*code")
    await feed.describe(t)
    await feed.apply(t.relation, t.insert(1, "a"))
    with refused(RelationError, "an update whose old row lacks the target's key", sqlstate=_PREREQUISITE) as caught:
        await feed.apply(t.update(2, "b", old=(None, "a")))
    demand("public.t" in caught.error.one_line(), f"the error does not name the relation: {caught.error.one_line()}")
    await feed.expect(t, (1, "a"))


@scenarios
async def toasted_keys(feed: Feed) -> None:
    """TOASTed key columns are sent with every update in the old key, changed or not, but not in the new row."""
    t = Table("t", "*id int4", "*code", "v", "doc")
    await feed.create(t)
    long = {letter: letter * 60 for letter in "abcde"}
    await feed.apply(t.relation, *(t.insert(number, code, "1", "kept") for number in (1, 2) for code in long.values()))
    a, b, c, d, e = long.values()
    changes: list[Message] = [
        t.update(1, UNSENT, "2", UNSENT, old=(1, a, None, None)),
        t.update(1, UNSENT, "2", UNSENT, old=(1, b, None, None)),
        t.update(3, UNSENT, "2", UNSENT, old=(1, c, None, None)),
        t.update(1, UNSENT, "2", "new", old=(1, d, None, None)),
        t.update(1, UNSENT, UNSENT, UNSENT, old=(1, d, None, None)),
        t.update(1, UNSENT, "2", UNSENT, old=(1, e, None, None)),
        t.update(1, UNSENT, "3", UNSENT, old=(1, e, None, None)),
        t.delete(1, e, None, None),
    ]
    await feed.apply(*changes)
    changed = [(1, a, "2", "kept"), (1, b, "2", "kept"), (3, c, "2", "kept"), (1, d, "2", "new")]
    kept = [(2, code, "1", "kept") for code in long.values()]
    await feed.expect(t, *changed, *kept)
    await feed.apply(t.update(3, a, UNSENT, UNSENT, old=(3, c, None, None)), t.delete(1, a, None, None))
    await feed.expect(t, (3, a, "2", "kept"), *changed[1:2], changed[3], *kept)


@scenarios.needing("any_key")
async def another_unique_key(feed: Feed) -> None:
    """The publisher's identity is not the target's primary key, but another unique key."""
    made = Table("t", "*id int4", "^!code int4", "v")
    await feed.create(made)
    t = Table("t", "id int4", "*code int4", "v")
    await feed.describe(t)
    await feed.apply(t.relation, t.insert(1, 10, "a"), t.insert(2, 20, "b"))
    await feed.apply(t.update(3, 10, "c"), t.update(2, 21, "d", old=(None, 20, None)), t.delete(None, 10, None))
    await feed.expect(t, (2, 21, "d"))
