"""Names of sessions that a server keeps as they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from subscriber.protocol.session_name import session_name

ROLES = ("setup", "alter", "drop", "check", "sync", "parallel apply")
# what a subscription may be called, and names that are nearly the same
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=63).filter(
    lambda name: len(name.encode()) <= 63
)


def test_short_names_are_kept() -> None:
    assert session_name("replica", "setup") == "replica setup"
    assert session_name("x" * 57, "setup") == "x" * 57 + " setup"


@given(NAMES, NAMES, st.sampled_from(ROLES), st.sampled_from(ROLES))
def test_different_roles_or_names_give_different_names(one: str, other: str, role: str, other_role: str) -> None:
    found = session_name(one, role)
    # PostgreSQL 13 to 18 keep these bytes, and no more of them
    assert len(found.encode()) <= 63
    assert found.isascii()
    assert found.isprintable()
    assert found.endswith(f" {role}")
    if (one, role) != (other, other_role):
        assert found != session_name(other, other_role) or f"{one} {role}" == f"{other} {other_role}"


def test_long_names_that_differ_at_their_ends() -> None:
    names = ["x" * 62 + end for end in "ab"]
    found = {session_name(name, role) for name in names for role in ROLES}
    assert len(found) == len(names) * len(ROLES)
    assert found.isdisjoint(names)
    # "ä" and "ö" are both "?" or four bytes to the server
    assert session_name("ä", "setup") != session_name("ö", "setup")
