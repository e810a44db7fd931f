"""Resolve the oid of a column to its type.

::

    registry = TypeRegistry()                    # the built-in types
    registry.add(published.types)                # other types, from the publisher's catalog
    registry.define(oid, namespace, name)        # a Type message: only a name
    column = registry.resolve(oid, modifier)     # -> PgType

An unknown type is read as text, which every type has. Its binary format is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from subscriber.types.builtin import CATALOG, builtin_facts
from subscriber.types.pg_type import Attribute, TypeFact, TypeKind

__all__ = ["PgAttribute", "PgType", "TypeRegistry"]

_DEPTH: Final = 64
_HEADER: Final = 4
"""VARHDRSZ, which is added to the modifiers of lengths and of numeric."""


@dataclass(frozen=True, slots=True)
class PgAttribute:
    """One attribute of a composite type, resolved."""

    name: str
    type: PgType


@dataclass(frozen=True, slots=True)
class PgType:
    """A column's type with all its parts.

    Attributes:
        oid: on the publisher.
        namespace, name: as in ``pg_type``: ``pg_catalog``, ``int4``.
        kind: never DOMAIN: a domain has the kind of its base type, and :attr:`domain` is set. ``BASE`` also for an unknown type.
        modifier: ``atttypmod``, or the domain's; -1 for none.
        element: an array's element type, a range's subtype, a multirange's range type; else None.
        attributes: of a composite type.
        labels: of an enum.
        delimiter: between elements in the text of an array of it.
        domain: namespace and name of the column's domain, or None.
        known: whether the catalog describes it. If not, its binary format cannot be read.
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
        """The name of a built-in base type; None for all others."""
        return self.name if self.known and self.kind is TypeKind.BASE and self.namespace == CATALOG else None

    @property
    def precision_and_scale(self) -> tuple[int, int] | None:
        """Precision and scale of numeric(p,s). The scale may be negative, or above the precision. None: no limit was declared."""
        if self.builtin != "numeric" or self.modifier < _HEADER:
            return None
        packed = self.modifier - _HEADER
        # eleven bits of two's complement (numeric_typmod_scale)
        return packed >> 16, ((packed & 0x7FF) ^ 0x400) - 0x400

    @property
    def length(self) -> int | None:
        """Length of varchar(n), char(n), bit(n) or varbit(n), in characters or bits. None: no limit was declared."""
        if self.builtin in {"varchar", "bpchar"} and self.modifier >= _HEADER:
            return self.modifier - _HEADER
        return self.modifier if self.builtin in {"bit", "varbit"} and self.modifier > 0 else None

    def __str__(self) -> str:
        """The name for messages: without modifier. A domain has its own name."""
        namespace, name = self.domain or (self.namespace, self.name)
        if self.kind is TypeKind.ARRAY and self.element is not None and self.domain is None:
            return f"{self.element}[]"
        return name if namespace in {CATALOG, ""} else f"{namespace}.{name}"


_BUILTIN: Final = {fact.oid: fact for fact in builtin_facts()}


class TypeRegistry:
    """All known types of one publisher. Oids are not valid for another one."""

    __slots__ = ("_facts", "_named", "_resolved")

    def __init__(self) -> None:
        self._facts = dict(_BUILTIN)
        self._named: dict[int, tuple[str, str]] = {}
        self._resolved: dict[tuple[int, int], PgType] = {}

    def add(self, facts: Iterable[TypeFact]) -> None:
        """Add types from a catalog. Later entries replace earlier ones."""
        for fact in facts:
            self._facts[fact.oid] = fact
        self._resolved.clear()

    def define(self, oid: int, namespace: str, name: str) -> None:
        """Add a Type message. For a domain it names the base type. An entry from a catalog takes precedence."""
        self._named[oid] = (namespace, name)
        self._resolved.clear()

    def facts_of(self, oids: Iterable[int]) -> tuple[TypeFact, ...]:
        """Return the added entries of these types and of their parts, by oid. Another registry needs no more to resolve the types."""
        seen, _ = self._closure(oids)
        return tuple(self._facts[oid] for oid in sorted(seen) if oid in self._facts and oid not in _BUILTIN)

    def unknown(self, oids: Iterable[int]) -> frozenset[int]:
        """Return those of the types, and of their parts, that no catalog entry describes."""
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
        """Return the type of a column.

        Args:
            oid: the type's, from a Relation message or a catalog.
            modifier: ``atttypmod``.
        """
        found = self._resolved.get((oid, modifier))
        if found is None:
            found = self._resolved[oid, modifier] = self._resolve(oid, modifier, _DEPTH)
        return found

    def base_of_domain(self, oid: int) -> tuple[int, int] | None:
        """Return the base type of a domain and the modifier that the domain gives it; None for other types, and if it is not known."""
        fact = self._facts.get(oid)
        return (fact.element, fact.modifier) if fact is not None and fact.kind is TypeKind.DOMAIN else None

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
            # a domain over a built-in type: a Type message does not give its modifier
            for fact in self._facts.values():
                if fact.namespace == CATALOG and fact.name == name and fact.oid != oid:
                    base = self._resolve(fact.oid, -1, 1) if fact.kind is TypeKind.BASE else self._resolve(fact.oid, -1, _DEPTH)
                    return PgType(oid, base.namespace, base.name, base.kind, -1, base.element, (), (), base.delimiter, (namespace, name))
        return PgType(oid, namespace, name, modifier=modifier, known=False)
