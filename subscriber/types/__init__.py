"""The types of PostgreSQL and how to read their values from the text and the binary format. Pure, no driver.

``registry.py`` resolves the oid of a column to a :class:`PgType`, ``codec.py`` reads its values, and ``copy_data.py`` splits COPY data into
fields. The stream and the copy use the same codecs, and every target converts the values that these return.
"""

from subscriber.types.codec import Codec, Value, codec
from subscriber.types.copy_data import CopyDecoder, copy_decoder
from subscriber.types.pg_type import Attribute, TypeFact, TypeKind
from subscriber.types.registry import PgAttribute, PgType, TypeRegistry
from subscriber.types.value_errors import ValueRefused

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
