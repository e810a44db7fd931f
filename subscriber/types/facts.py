"""What a catalog says of a type: as much of ``pg_type`` and its relatives as is needed to read values.

Built-in types have the same oids in every PostgreSQL (:mod:`subscriber.types.builtin`); of all others the publisher tells. Oids are the
publisher's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Attribute", "TypeFact", "TypeKind"]


class TypeKind(StrEnum):
    """What a type is, by ``pg_type.typtype``; arrays, which are base types there, apart."""

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
        oid, namespace, name: whose.
        kind: see :class:`TypeKind`.
        element: oid of what it is made of: an array's elements, a domain's base type, a range's subtype, a multirange's range; else 0.
        modifier: a domain's ``typtypmod``: what it makes of its base type; else -1.
        delimiter: between elements, in texts of arrays of this type (of the elements, for an array).
        attributes: of a composite type, in order, dropped ones left out.
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
