"""JSON documents of a lake. Each has a format number and a checksum, and is replaced as a whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from subscriber.errors import ConfigurationError, TargetError
from subscriber.sinks.spark.files.file_errors import DamagedFile
from subscriber.sinks.spark.files.storage import Storage

__all__ = ["json_text", "parse_document", "read_document", "write_document"]

_Parsed = TypeVar("_Parsed")


_FORMAT: Final = 1


def json_text(value: object) -> str:
    """The JSON text of a document or a part of it. It is always the same, because the checksum is of this text."""
    return json.dumps(value, ensure_ascii=True, sort_keys=True)


def write_document(storage: Storage, name: str, document: Mapping[str, Any] | str, *, durable: bool = True, private: bool = False) -> None:
    """Store a JSON document, or its :func:`json_text`, as a whole, with its checksum.

    ``durable``: fsync it. ``private``: only its owner may read it.
    """
    body = document if isinstance(document, str) else json_text(document)
    content = f'{{"crc": {zlib.crc32(body.encode())}, "document": {body}, "format": {_FORMAT}}}'
    storage.write(name, content.encode(), durable=durable, private=private)


def read_document(storage: Storage, name: str) -> dict[str, Any] | None:
    """Read a document that :func:`write_document` stored. None if there is none."""
    content = storage.read(name)
    if content is None:
        return None
    try:
        outer = json.loads(content)
        version, document = outer["format"], outer["document"]
        intact = version != _FORMAT or outer["crc"] == zlib.crc32(json_text(document).encode())
    except (ValueError, KeyError, TypeError):
        raise DamagedFile(storage.what(name), name) from None
    if version != _FORMAT:
        raise TargetError(
            f"{storage.what(name)} has format {version}, not {_FORMAT}",
            hint="use the version of pg-subscriber that created this lake, or a later one",
        )
    if not intact or not isinstance(document, dict):
        raise DamagedFile(storage.what(name), name)
    return document


def parse_document(
    storage: Storage,
    name: str,
    parse: Callable[[dict[str, Any]], _Parsed],
    hint: str | None = None,
) -> _Parsed | None:
    """Read a document as :func:`read_document`, and parse it. ``hint`` replaces the usual one for a damaged document."""
    document = read_document(storage, name)
    try:
        return None if document is None else parse(document)
    except (ValueError, KeyError, TypeError, AttributeError, ConfigurationError):
        damaged = DamagedFile(storage.what(name), name)
        damaged.hint = hint or damaged.hint
        raise damaged from None
