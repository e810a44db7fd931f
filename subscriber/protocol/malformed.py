"""Errors of the decoders in this package: always a ProtocolError that names the message's tag and an offset."""

from __future__ import annotations

from subscriber.errors import ProtocolError

__all__ = ["ends_early", "malformed", "tag_name", "trailing_bytes"]


def tag_name(tag: int) -> str:
    r"""Name a tag byte as one character, or as ``\xNN`` where it is not a printable ASCII character."""
    return chr(tag) if 0x20 < tag < 0x7F else f"\\x{tag:02x}"


def malformed(payload: bytes, offset: int, what: str) -> ProtocolError:
    """Make the error for bytes that break the format at ``offset``. ``what`` must never contain a value."""
    return ProtocolError(what, offset=offset, tag=tag_name(payload[0]) if payload else None)


def ends_early(payload: bytes) -> ProtocolError:
    """Make the error for a payload that is shorter than its fields require."""
    return malformed(payload, len(payload), "message ends before its last field")


def trailing_bytes(payload: bytes, offset: int) -> ProtocolError:
    """Make the error for bytes after the last field, which ends at ``offset``."""
    return malformed(payload, offset, f"{len(payload) - offset} trailing bytes")
