"""From oids to types."""

from __future__ import annotations

import pytest

from subscriber.types import Attribute, PgType, TypeFact, TypeKind, TypeRegistry

INT4, TEXT, NUMERIC, INT4S, INT4RANGE, INT4MULTIRANGE = 23, 25, 1700, 1007, 3904, 4451

MOOD = TypeFact(20_000, "app", "mood", TypeKind.ENUM, labels=("sad", "ok"))
MOODS = TypeFact(20_001, "app", "_mood", TypeKind.ARRAY, MOOD.oid)
PRICE = TypeFact(20_002, "app", "price", TypeKind.DOMAIN, NUMERIC, modifier=((10 << 16) | 2) + 4)
DEAR = TypeFact(20_003, "app", "dear", TypeKind.DOMAIN, PRICE.oid)
PAIR = TypeFact(20_004, "app", "pair", TypeKind.COMPOSITE, attributes=(Attribute("a", INT4), Attribute("b", MOODS.oid)))
FACTS = (MOOD, MOODS, PRICE, DEAR, PAIR)


@pytest.fixture
def registry() -> TypeRegistry:
    found = TypeRegistry()
    found.add(FACTS)
    return found


def test_builtin_types_are_known() -> None:
    registry = TypeRegistry()
    assert registry.resolve(INT4) == PgType(INT4, "pg_catalog", "int4")
    numbers = registry.resolve(INT4S)
    assert (numbers.kind, numbers.element) == (TypeKind.ARRAY, registry.resolve(INT4))
    several = registry.resolve(INT4MULTIRANGE)
    assert several.kind is TypeKind.MULTIRANGE
    assert several.element is not None
    assert (several.element.oid, several.element.kind) == (INT4RANGE, TypeKind.RANGE)
    assert several.element.element == registry.resolve(INT4)
    assert registry.unknown([INT4, INT4S, INT4MULTIRANGE]) == frozenset()


def test_a_domain_is_its_base_type_with_the_domains_modifier(registry: TypeRegistry) -> None:
    dear = registry.resolve(DEAR.oid)
    assert (dear.builtin, dear.domain, dear.oid) == ("numeric", ("app", "dear"), DEAR.oid)
    assert registry.resolve(PRICE.oid).precision_and_scale == (10, 2)
    assert str(dear) == "app.dear"


def test_composite_types_and_arrays_of_others(registry: TypeRegistry) -> None:
    pair = registry.resolve(PAIR.oid)
    assert [(attribute.name, str(attribute.type)) for attribute in pair.attributes] == [("a", "int4"), ("b", "app.mood[]")]
    moods = registry.resolve(MOODS.oid)
    assert moods.element is not None
    assert moods.element.labels == ("sad", "ok")
    assert pair.builtin is None


def test_facts_of_gives_all_that_another_registry_needs(registry: TypeRegistry) -> None:
    facts = registry.facts_of([PAIR.oid, INT4])
    assert facts == (MOOD, MOODS, PAIR)
    other = TypeRegistry()
    other.add(facts)
    assert other.resolve(PAIR.oid) == registry.resolve(PAIR.oid)


def test_unknown_includes_the_parts_of_a_type() -> None:
    registry = TypeRegistry()
    registry.add([PAIR, DEAR])
    assert registry.unknown([PAIR.oid, DEAR.oid, 77_777]) == {MOODS.oid, PRICE.oid, 77_777}


def test_unknown_type_is_text() -> None:
    registry = TypeRegistry()
    stranger = registry.resolve(77_777)
    assert (stranger.known, stranger.builtin, str(stranger)) == (False, None, "with OID 77777")
    registry.define(77_777, "app", "mood")
    assert str(registry.resolve(77_777)) == "app.mood"
    assert not registry.resolve(77_777).known


def test_a_type_message_of_a_domain_names_the_base_type() -> None:
    registry = TypeRegistry()
    registry.define(77_777, "pg_catalog", "int4")
    assert registry.resolve(77_777).builtin == "int4"
    # what the catalog says goes before
    registry.add([TypeFact(77_777, "app", "mood", TypeKind.ENUM)])
    assert registry.resolve(77_777).kind is TypeKind.ENUM


@pytest.mark.parametrize(
    ("oid", "modifier", "digits"),
    [
        (NUMERIC, -1, None),
        (NUMERIC, ((10 << 16) | 3) + 4, (10, 3)),
        (NUMERIC, ((3 << 16) | (-2 & 0x7FF)) + 4, (3, -2)),
        (NUMERIC, ((2 << 16) | 7) + 4, (2, 7)),
        (INT4, 5, None),
    ],
)
def test_digits_of_numeric(oid: int, modifier: int, digits: tuple[int, int] | None) -> None:
    assert TypeRegistry().resolve(oid, modifier).precision_and_scale == digits


@pytest.mark.parametrize(("oid", "modifier", "length"), [(1043, 14, 10), (1042, 9, 5), (1043, -1, None), (1560, 4, 4), (25, -1, None)])
def test_lengths(oid: int, modifier: int, length: int | None) -> None:
    assert TypeRegistry().resolve(oid, modifier).length == length


def test_the_modifier_of_an_array_is_that_of_its_elements() -> None:
    numbers = TypeRegistry().resolve(1231, ((10 << 16) | 3) + 4)
    assert numbers.element is not None
    assert numbers.element.precision_and_scale == (10, 3)


def test_recursive_types_are_cut_off() -> None:
    registry = TypeRegistry()
    registry.add([TypeFact(20_010, "app", "loop", TypeKind.DOMAIN, 20_010)])
    assert not registry.resolve(20_010).known
