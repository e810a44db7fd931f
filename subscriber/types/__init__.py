"""Types of PostgreSQL: what is known of them, and how their values are read, from texts and from the binary format. Pure, no driver.

``registry.py`` turns the oid of a column into a :class:`PgType`; ``codec.py`` reads its values; ``copying.py`` splits COPY data into
fields. One codec serves the stream and the copy, and every target maps its values on.
"""

from subscriber.types.codec import Codec, Value, codec
from subscriber.types.copying import CopyDecoder, copy_decoder
from subscriber.types.facts import Attribute, TypeFact, TypeKind
from subscriber.types.failures import ValueRefused
from subscriber.types.registry import PgAttribute, PgType, TypeRegistry

__all__ = [
    "Attribute",
    "Codec",
    "CopyDecoder",
    "PgAttribute",
    "PgType",
    "TypeFact",
    "TypeKind",
    "TypeRegistry",
    "Value",
    "ValueRefused",
    "codec",
    "copy_decoder",
]
