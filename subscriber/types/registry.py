"""From the oid that comes with a column to everything that is known of its type.

::

    registry = TypeRegistry()                    # the built-in types
    registry.add(published.types)                # what the publisher's catalog says of others
    registry.define(oid, namespace, name)        # what a Type message says: better than nothing
    column = registry.resolve(oid, modifier)     # -> PgType

A type that nobody told anything of is read as text, which every type has; its binary format is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from subscriber.types.builtin import CATALOG, builtin_facts
from subscriber.types.facts import Attribute, TypeFact, TypeKind

__all__ = ["PgAttribute", "PgType", "TypeRegistry"]

_DEPTH: Final = 64
_HEADER: Final = 4
"""VARHDRSZ, which modifiers of lengths and of numeric contain."""


@dataclass(frozen=True, slots=True)
class PgAttribute:
    """One attribute of a composite type, resolved."""

    name: str
    type: PgType


@dataclass(frozen=True, slots=True)
class PgType:
    """A column's type with everything it is made of.

    Attributes:
        oid: the publisher's.
        namespace, name: as ``pg_type`` has them: ``pg_catalog``, ``int4``.
        kind: never a domain: that is its base type here, with :attr:`domain` set; ``BASE`` also for what is unknown.
        modifier: ``atttypmod``, or the domain's; -1 for none.
        element: what it is made of: an array's elements, a range's subtype, a multirange's range; else None.
        attributes: of a composite type.
        labels: of an enum.
        delimiter: between elements in the text of an array of it.
        domain: namespace and name of the domain that the column has, or None.
        known: whether the catalog told of it: only then its binary format can be read.
    """

    oid: int
    namespace: str
    name: str
    kind: TypeKind = TypeKind.BASE
    modifier: int = -1
    element: PgType | None = None
    attributes: tuple[PgAttribute, ...] = ()
    labels: tuple[str, ...] = ()
    delimiter: str = ","
    domain: tuple[str, str] | None = None
    known: bool = True

    @property
    def builtin(self) -> str | None:
        """The name, of a built-in base type; None for all others."""
        return self.name if self.known and self.kind is TypeKind.BASE and self.namespace == CATALOG else None

    @property
    def precision_and_scale(self) -> tuple[int, int] | None:
        """Of a declared numeric(p,s); the scale may be negative, or above the precision. None: any number of digits."""
        if self.builtin != "numeric" or self.modifier < _HEADER:
            return None
        packed = self.modifier - _HEADER
        # eleven bits of two's complement (numeric_typmod_scale)
        return packed >> 16, ((packed & 0x7FF) ^ 0x400) - 0x400

    @property
    def length(self) -> int | None:
        """Of a declared varchar(n), char(n), bit(n) or varbit(n): characters or bits at most. None: as many as may be."""
        if self.builtin in {"varchar", "bpchar"} and self.modifier >= _HEADER:
            return self.modifier - _HEADER
        return self.modifier if self.builtin in {"bit", "varbit"} and self.modifier > 0 else None

    def __str__(self) -> str:
        """As a message names it: without modifier, a domain by its own name."""
        namespace, name = self.domain or (self.namespace, self.name)
        if self.kind is TypeKind.ARRAY and self.element is not None and self.domain is None:
            return f"{self.element}[]"
        return name if namespace in {CATALOG, ""} else f"{namespace}.{name}"


class TypeRegistry:
    """All types known. One belongs to one publisher: oids mean nothing elsewhere."""

    __slots__ = ("_builtin", "_facts", "_named", "_resolved")

    def __init__(self) -> None:
        self._facts = {fact.oid: fact for fact in builtin_facts()}
        self._builtin = frozenset(self._facts)
        self._named: dict[int, tuple[str, str]] = {}
        self._resolved: dict[tuple[int, int], PgType] = {}

    def add(self, facts: Iterable[TypeFact]) -> None:
        """Take over what a catalog says; later words replace earlier ones."""
        for fact in facts:
            self._facts[fact.oid] = fact
        self._resolved.clear()

    def define(self, oid: int, namespace: str, name: str) -> None:
        """Take over a Type message: of a domain it names the base type. What a catalog said goes before."""
        self._named[oid] = (namespace, name)
        self._resolved.clear()

    def facts_of(self, oids: Iterable[int]) -> tuple[TypeFact, ...]:
        """What was added for these types and for what they are made of, by oid: all that another registry needs for them."""
        seen, _ = self._closure(oids)
        return tuple(self._facts[oid] for oid in sorted(seen) if oid in self._facts and oid not in self._builtin)

    def unknown(self, oids: Iterable[int]) -> frozenset[int]:
        """Those of the types, and of what they are made of, that no catalog told of."""
        return frozenset(self._closure(oids)[1])

    def _closure(self, oids: Iterable[int]) -> tuple[set[int], set[int]]:
        missing: set[int] = set()
        seen: set[int] = set()
        waiting = list(oids)
        while waiting:
            oid = waiting.pop()
            if oid in seen:
                continue
            seen.add(oid)
            fact = self._facts.get(oid)
            if fact is None:
                missing.add(oid)
            else:
                waiting += [attribute.type_oid for attribute in fact.attributes]
                if fact.element:
                    waiting.append(fact.element)
        return seen, missing

    def resolve(self, oid: int, modifier: int = -1) -> PgType:
        """The type of a column.

        Args:
            oid: of the type, as Relation messages and catalogs give it.
            modifier: ``atttypmod``.
        """
        found = self._resolved.get((oid, modifier))
        if found is None:
            found = self._resolved[oid, modifier] = self._resolve(oid, modifier, _DEPTH)
        return found

    def _resolve(self, oid: int, modifier: int, depth: int) -> PgType:
        fact = self._facts.get(oid)
        if fact is None or depth == 0:
            return self._by_name(oid, modifier)
        if fact.kind is TypeKind.DOMAIN:
            base = self._resolve(fact.element, fact.modifier, depth - 1)
            return PgType(
                oid,
                base.namespace,
                base.name,
                base.kind,
                base.modifier,
                base.element,
                base.attributes,
                base.labels,
                fact.delimiter,
                (fact.namespace, fact.name),
                known=base.known,
            )
        # the modifier of an array is that of its elements
        inner = modifier if fact.kind is TypeKind.ARRAY else -1
        return PgType(
            oid,
            fact.namespace,
            fact.name,
            fact.kind,
            modifier,
            self._resolve(fact.element, inner, depth - 1) if fact.element else None,
            tuple(self._attribute(attribute, depth) for attribute in fact.attributes),
            fact.labels,
            fact.delimiter,
        )

    def _attribute(self, attribute: Attribute, depth: int) -> PgAttribute:
        return PgAttribute(attribute.name, self._resolve(attribute.type_oid, attribute.modifier, depth - 1))

    def _by_name(self, oid: int, modifier: int) -> PgType:
        namespace, name = self._named.get(oid, ("", f"with OID {oid}"))
        if namespace == CATALOG:
            # a domain over it: its modifier is not told
            for fact in self._facts.values():
                if fact.namespace == CATALOG and fact.name == name and fact.oid != oid:
                    base = self._resolve(fact.oid, -1, 1) if fact.kind is TypeKind.BASE else self._resolve(fact.oid, -1, _DEPTH)
                    return PgType(oid, base.namespace, base.name, base.kind, -1, base.element, (), (), base.delimiter, (namespace, name))
        return PgType(oid, namespace, name, modifier=modifier, known=False)
