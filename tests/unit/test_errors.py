"""The error tree is what its drawing says, and errors print on one line."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from subscriber import errors
from subscriber.errors import ApplyError, ProtocolError, SubscriberError, TargetError

CLASSES = {name: getattr(errors, name) for name in errors.__all__}


def drawn() -> dict[str, str]:
    """Parent of each class, as the docstring draws it; the root has none."""
    tree = (errors.__doc__ or "").split("::\n", 1)[1]
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in tree.splitlines():
        match = re.match(r"([ │├└─]*)([A-Z]\w+)( {2,}\w|$)", line)
        if match is None:
            if above and line.strip():
                break
            continue
        depth = len(match[1])
        above = [(found, name) for found, name in above if found < depth]
        parents[match[2]] = above[-1][1] if above else ""
        above.append((depth, match[2]))
    return parents


def test_docstring_shows_the_class_tree() -> None:
    assert drawn() == {name: "" if found is SubscriberError else found.__base__.__name__ for name, found in CLASSES.items()}


def test_all_classes_are_public_and_described() -> None:
    defined = {
        name
        for name, found in inspect.getmembers(errors, inspect.isclass)
        if found.__module__ == errors.__name__ and issubclass(found, BaseException)
    }
    assert defined == set(errors.__all__)
    for found in CLASSES.values():
        assert issubclass(found, SubscriberError)
        assert found.__doc__


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_message_hint_and_state(name: str) -> None:
    keywords = {} if name == "ProtocolError" else {"hint": "fix it", "sqlstate": "42P01"}
    error = CLASSES[name]("it broke", **keywords)
    assert str(error) == "it broke"
    assert error.hint == keywords.get("hint")
    assert error.sqlstate == keywords.get("sqlstate")


def test_one_line() -> None:
    error = ApplyError("it\n  broke", hint="fix it")
    assert error.one_line() == "it broke (hint: fix it)"
    error.add_note("while\tcopying\ntable t")
    error.add_note("twice")
    assert error.one_line() == "it broke; while copying table t; twice (hint: fix it)"
    assert TargetError("it broke").one_line() == "it broke"


def test_one_line_with_any_hint() -> None:
    assert "\n" not in TargetError("it broke", hint="fix it:\nso").one_line()


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, "too short"),
        ({"tag": "I"}, "too short in message 'I'"),
        ({"offset": 0}, "too short at offset 0"),
        ({"tag": "I", "offset": 7}, "too short in message 'I' at offset 7"),
    ],
)
def test_protocol_errors_say_where(where: dict[str, object], expected: str) -> None:
    error = ProtocolError("too short", **where)  # type: ignore[arg-type]
    assert str(error) == expected
    assert (error.offset, error.tag) == (where.get("offset"), where.get("tag"))


@pytest.mark.parametrize("kind", CLASSES.values())
def test_errors_can_be_pickled(kind: type[SubscriberError]) -> None:
    error = kind("text\x07", hint="do this", sqlstate="55000") if kind is not ProtocolError else kind("text", offset=3, tag="I")
    error.add_note("while that was done")
    error.also.append(TargetError("another", hint="and this"))
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind
    assert found.one_line() == error.one_line()
    assert {**vars(found), "also": None} == {**vars(error), "also": None}
