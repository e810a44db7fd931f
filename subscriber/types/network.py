"""Network addresses: convert binary format to PostgreSQL's own text. Sources: ``network_send``, ``network_out``, ``pg_inet_net_ntop``."""

from __future__ import annotations

from typing import Final

__all__ = ["inet_text", "macaddr_text"]

_INET: Final = 2
_INET6: Final = 3
_WIDTHS: Final = ((_INET, 4), (_INET6, 16))
_MAPPED: Final = 0xFFFF


def inet_text(data: bytes) -> str:
    """Text of inet and cidr. The format: family, bits of the netmask, whether it is a cidr, length of the address, address."""
    family, bits, is_cidr, length = data[:4]
    address = data[4:]
    if len(address) != length or (family, length) not in _WIDTHS or bits > length * 8:
        raise ValueError("incorrect binary data format of inet")
    text = ".".join(map(str, address)) if family == _INET else _inet6(address)
    return text if bits == length * 8 and not is_cidr else f"{text}/{bits}"


def _inet6(address: bytes) -> str:
    words = [int.from_bytes(address[start : start + 2]) for start in range(0, 16, 2)]
    first, length = _longest_zeros(words)
    # the part after so many zeros is written as an IPv4 address
    as_ipv4 = first == 0 and (length == 6 or (length == 7 and words[7] != 1) or (length == 5 and words[5] == _MAPPED))
    tail = words[6:] if as_ipv4 else []
    ipv4 = ".".join(map(str, address[12:]))
    head = words[: len(words) - len(tail)]
    if length < 2:
        return ":".join(f"{word:x}" for word in words)
    before = ":".join(f"{word:x}" for word in head[:first])
    after = [f"{word:x}" for word in head[first + length :]] + ([ipv4] if as_ipv4 else [])
    return f"{before}::{':'.join(after)}"


def _longest_zeros(words: list[int]) -> tuple[int, int]:
    """Return the start and the length of the longest run of zeros; of equal runs, the first."""
    best = (0, 0)
    start = 0
    while start < len(words):
        end = start
        while end < len(words) and words[end] == 0:
            end += 1
        if end - start > best[1]:
            best = (start, end - start)
        start = end + 1
    return best


def macaddr_text(data: bytes) -> str:
    """Text of macaddr and macaddr8."""
    if len(data) not in {6, 8}:
        raise ValueError("incorrect binary data format of macaddr")
    return data.hex(":")
