"""Which columns a Relation message describes, by what is known before it and what the publisher's catalog has after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from subscriber.protocol.lsn import Lsn
from subscriber.transaction.column_history import Attribute, Attributes, KnownColumns, Uncertain, changed_columns, known_of
from subscriber.transaction.type_changes import is_exact, keeps_values

TABLE = 16400


@dataclass
class Publisher:
    """A table on a publisher: its columns, and the LSN and xid of the last statement."""

    all: list[Attribute] = field(default_factory=list)
    lsn: int = 100
    files: str = "1"

    def _find(self, name: str) -> int:
        return next(place for place, each in enumerate(self.all) if each.name == name and not each.dropped)

    def has(self, name: str) -> bool:
        return any(each.name == name and not each.dropped for each in self.all)

    def alter(self, *statements: str) -> None:
        """``add x``, ``drop x``, ``rename x y``, ``type x t``: one transaction."""
        self.lsn += 1
        for statement in statements:
            what, name, *more = statement.split()
            if what == "add":
                self.all.append(Attribute(len(self.all) + 1, name, "integer", self.lsn))
                continue
            place = self._find(name)
            changed = self.all[place]
            if what == "drop":
                changed = replace(changed, name="", type="-", dropped=True)
            elif what == "rename":
                changed = replace(changed, name=more[0])
            else:
                changed = replace(changed, type=more[0])
            self.all[place] = replace(changed, version=self.lsn)

    def read(self) -> Attributes:
        """Read the catalog."""
        self.lsn += 1
        return Attributes(TABLE, Lsn(self.lsn), tuple(self.all), self.files)

    def write(self) -> tuple[Sequence[tuple[str, str]], Lsn, list[int]]:
        """Commit a row: its columns, its final LSN, and the true numbers of its columns."""
        self.lsn += 1
        live = [each for each in self.all if not each.dropped]
        return [(each.name, each.type) for each in live], Lsn(self.lsn), [each.number for each in live]


def made(*names: str) -> tuple[Publisher, KnownColumns]:
    publisher = Publisher()
    publisher.alter(*(f"add {name}" for name in names))
    return publisher, known_of(publisher.read())


def compared(columns: str, before: Sequence[str], after: Sequence[str] = ()) -> str:
    """The changes of a row between statements, as text."""
    publisher, known = made(*columns.split())
    for each in before:
        publisher.alter(*each.split(", "))
    described, lsn, numbers = publisher.write()
    for each in after:
        publisher.alter(*each.split(", "))
    try:
        changes = changed_columns(known, publisher.read(), described, lsn)
    except Uncertain as error:
        return str(error)
    assert [each.number for each in changes.known.columns] == numbers
    found = [f"rename {old} {new}" for old, new in (changes.renamed or {}).items()]
    found += [f"drop {name}" for name in changes.dropped] + [f"add {name}" for _, name in changes.added]
    return ", ".join([*found, *(f"type {name} {new}" for name, (_, new) in (changes.retyped or {}).items())])


ONLY_RESULT = "columns were added and dropped, and the publisher's catalog shows only the result"


@pytest.mark.parametrize(
    ("columns", "before", "after", "expected"),
    [
        ("id a", [], [], ""),
        ("id a", ["rename a b"], [], "rename a b"),
        ("id a", ["rename a b"], ["rename b c", "drop id"], "rename a b"),
        ("id a b", ["rename a x, rename b a, rename x b"], [], "rename a b, rename b a"),
        ("id a b", ["rename a x, rename b a, rename x b"], ["rename a x, rename b a, rename x b"], "rename a b, rename b a"),
        ("id a", ["rename a b", "add a"], [], "rename a b, add a"),
        ("id a", ["add b", "add c"], ["add d"], "add b, add c"),
        ("id a", ["add b"], ["rename b c", "type c text"], "add b"),
        ("id a b", ["drop a"], [], "drop a"),
        ("id a b", [], ["drop a"], ""),
        ("id a", ["type a bigint"], ["type a text"], "type a bigint"),
        # untouched columns tell where the new one is
        ("id a b", ["drop a, add c"], [], "drop a, add c"),
        ("id a b", ["drop a", "add a"], [], "drop a, add a"),
        ("id a b", [], ["drop a", "add a"], ""),
        ("id a b", ["add x", "drop x"], ["add c"], ""),
        # not certain: the column may have been renamed before the row, and dropped after it
        ("id a", ["drop a, add b"], [], ONLY_RESULT),
        ("id a", ["drop a, add a"], [], ONLY_RESULT),
        ("id a", ["rename a b"], ["drop b, add b"], ONLY_RESULT),
        ("id a b", ["drop a", "rename b a", "add b"], [], ONLY_RESULT),
    ],
)
def test_changes(columns: str, before: list[str], after: list[str], expected: str) -> None:
    assert compared(columns, before, after) == expected


def test_what_was_read_before_a_transaction_is_certain() -> None:
    """DROP and ADD of the last column: the catalog was read between them and the row."""
    publisher, known = made("id", "a")
    described, lsn, _ = publisher.write()
    publisher.alter("drop a", "add a")
    with pytest.raises(Uncertain):
        changed_columns(known, publisher.read(), described, lsn)
    publisher.alter("add z")
    described, lsn, _ = publisher.write()
    known = replace(known, read=publisher.read().lsn, live=(1, 3, 4), gone=(2,))
    described, lsn, _ = publisher.write()
    changes = changed_columns(known, publisher.read(), described, lsn)
    assert (changes.dropped, changes.added) == (("a",), ((3, "a"), (4, "z")))


def test_files_are_those_before_the_columns_that_come_later() -> None:
    publisher, known = made("id", "a")
    described, lsn, _ = publisher.write()
    publisher.alter("add b")
    publisher.files = "2"
    changes = changed_columns(known, publisher.read(), described, lsn)
    assert changes.known.files == "1"
    described, lsn, _ = publisher.write()
    assert changed_columns(changes.known, publisher.read(), described, lsn).known.files == "2"


def test_catalogs_that_do_not_fit() -> None:
    publisher, known = made("id", "a")
    old = publisher.read()
    publisher.alter("rename a b")
    described, lsn, _ = publisher.write()
    with pytest.raises(Uncertain, match="does not have them, or not yet"):
        changed_columns(known, old, described, lsn)
    with pytest.raises(Uncertain, match="another table than before"):
        changed_columns(replace(known, relation_id=1), publisher.read(), described, lsn)
    left = publisher.read()
    with pytest.raises(Uncertain, match='column "b" has left the publication'):
        changed_columns(known, replace(left, all=(left.all[0], replace(left.all[1], published=False))), described[:1], lsn)
    with pytest.raises(Uncertain, match='the publication has got column "b" after the table'):
        changed_columns(replace(known, columns=known.columns[:1]), left, described, lsn)


def test_text_of_a_state() -> None:
    publisher, known = made("id", 'a"ä')
    publisher.alter("drop id", "add b")
    described, lsn, _ = publisher.write()
    changed = changed_columns(known, publisher.read(), described, lsn).known
    for each in (known, replace(changed, target=((2, "x"),), files="7")):
        assert KnownColumns.parse(each.text()) == each


@given(
    st.lists(
        st.one_of(
            st.just("row"),
            st.just("apply"),
            st.lists(
                st.tuples(st.sampled_from(["add", "drop", "rename", "type"]), st.sampled_from("abcd"), st.sampled_from("abcd")),
                min_size=1,
                max_size=3,
            ),
        ),
        max_size=30,
    )
)
def test_what_is_certain_is_true(steps: list[object]) -> None:
    """Rows wait for any time until they are applied in order, and the catalog is read then. The numbers that are found are true."""
    publisher, known = made("a", "b")
    waiting = []
    certain = 0
    for step in [*steps, "row", "apply"]:
        if step == "row":
            waiting.append(publisher.write())
        elif step == "apply":
            for described, lsn, numbers in waiting:
                try:
                    changes = changed_columns(known, publisher.read(), described, lsn)
                except Uncertain:
                    # the table is synchronized again
                    known = known_of(publisher.read())
                    break
                certain += 1
                assert [each.number for each in changes.known.columns] == numbers
                known = changes.known
            waiting.clear()
        elif isinstance(step, list):
            for what, name, other in step:
                if what == "add" and not publisher.has(name):
                    publisher.alter(f"add {name}")
                elif what == "drop" and publisher.has(name):
                    publisher.alter(f"drop {name}")
                elif what == "rename" and publisher.has(name) and not publisher.has(other):
                    publisher.alter(f"rename {name} {other}")
                elif what == "type" and publisher.has(name):
                    publisher.alter(f"type {name} type{other}")
    event(f"certain: {min(certain, 5)}")


@pytest.mark.parametrize(
    ("old", "new", "exact", "kept"),
    [
        ("integer", "bigint", True, True),
        ("bigint", "numeric", True, True),
        ("bigint", "numeric(20,2)", True, False),
        ("numeric", "integer", True, False),
        ("numeric(9,4)", "numeric(9,2)", True, False),
        ("character varying(3)", "character varying(30)", True, True),
        ("character varying(3)", "text", True, True),
        ("timestamp without time zone", "timestamp(3) without time zone", True, False),
        ("timestamp without time zone", "timestamp with time zone", False, False),
        ("integer", "text", False, False),
        ("public.mood", "public.mood", False, False),
        ("integer[]", "bigint[]", False, False),
    ],
)
def test_types(old: str, new: str, exact: bool, kept: bool) -> None:
    assert (is_exact(old, new), keeps_values(old, new)) == (exact, kept)
