"""The rows of ``pg_type`` and related catalogs that are needed to read values.

Built-in types have the same oids in every PostgreSQL (:mod:`subscriber.types.builtin`). All others come from the publisher, with its oids.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Attribute", "TypeFact", "TypeKind"]


class TypeKind(StrEnum):
    """The kind of a type, by ``pg_type.typtype``. Arrays, which are base types there, have a kind of their own."""

    BASE = "b"
    COMPOSITE = "c"
    DOMAIN = "d"
    ENUM = "e"
    MULTIRANGE = "m"
    RANGE = "r"
    ARRAY = "a"


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute of a composite type."""

    name: str
    type_oid: int
    modifier: int = -1


@dataclass(frozen=True, slots=True)
class TypeFact:
    """One row of the publisher's ``pg_type``.

    Attributes:
        oid, namespace, name: those of the type.
        kind: see :class:`TypeKind`.
        element: oid of an array's element type, a domain's base type, a range's subtype or a multirange's range type; else 0.
        modifier: a domain's ``typtypmod``, which applies to its base type; else -1.
        delimiter: between elements in the text of an array of this type (for an array type: of its elements).
        attributes: of a composite type, in order, without dropped ones.
        labels: of an enum, in its order.
    """

    oid: int
    namespace: str
    name: str
    kind: TypeKind
    element: int = 0
    modifier: int = -1
    delimiter: str = ","
    attributes: tuple[Attribute, ...] = ()
    labels: tuple[str, ...] = ()
