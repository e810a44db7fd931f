"""tsvector and tsquery: convert binary format to PostgreSQL's text. Sources: ``tsvectorsend``, ``tsvectorout``, ``infix`` (tsquery.c)."""

from __future__ import annotations

from struct import Struct
from typing import Final

__all__ = ["tsquery_text", "tsvector_text"]

_COUNT: Final = Struct(">i")
_UINT16: Final = Struct(">H")
_WEIGHTS: Final = ("", "C", "B", "A")
_WEIGHT_BITS: Final = ((8, "A"), (4, "B"), (2, "C"), (1, "D"))

_OPERAND, _OPERATOR = 1, 2
_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_PRIORITIES: Final = ((_NOT, 4), (_AND, 2), (_OR, 1), (_PHRASE, 3))


def _quoted(lexeme: bytes) -> str:
    text = lexeme.decode().replace("\\", "\\\\").replace("'", "''")
    return f"'{text}'"


def _lexeme(data: bytes, position: int) -> tuple[str, int]:
    end = data.index(0, position)
    return _quoted(data[position:end]), end + 1


def tsvector_text(data: bytes) -> str:
    """Lexemes, each with its positions and their weights."""
    (count,) = _COUNT.unpack_from(data)
    position = 4
    words = []
    for _ in range(count):
        word, position = _lexeme(data, position)
        (places,) = _UINT16.unpack_from(data, position)
        position += 2
        found = []
        for _ in range(places):
            (entry,) = _UINT16.unpack_from(data, position)
            position += 2
            found.append(f"{entry & 0x3FFF}{_WEIGHTS[entry >> 14]}")
        words.append(f"{word}:{','.join(found)}" if found else word)
    if position != len(data):
        raise ValueError("incorrect binary data format of tsvector")
    return " ".join(words)


class _Query:
    """Reads a tsquery: operators come before their operands, and the right operand before the left one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        (self._left,) = _COUNT.unpack_from(data)
        self._position = 4

    def text(self) -> str:
        if self._left == 0:
            return ""
        # an explicit stack instead of recursion, because a query may be nested deeply
        stack: list[tuple[str, int]] = []
        items = [self._item() for _ in range(self._left)]
        if self._position != len(self._data):
            raise ValueError("incorrect binary data format of tsquery")
        # in reverse, so that the left operand is on top of the right one
        for item in reversed(items):
            if isinstance(item, str):
                stack.append((item, 0))
                continue
            operator, distance = item
            if operator == _NOT:
                inner, kind = stack.pop()
                stack.append((f"!{_enclosed(inner, kind, operator)}", operator))
                continue
            right, right_kind = stack.pop()
            left, left_kind = stack.pop()
            sign = {_AND: "&", _OR: "|"}.get(operator) or ("<->" if distance == 1 else f"<{distance}>")
            left = _enclosed(left, left_kind, operator)
            stack.append((f"{left} {sign} {_enclosed(right, right_kind, operator, right=True)}", operator))
        ((text, _),) = stack
        return text

    def _item(self) -> str | tuple[int, int]:
        data, position = self._data, self._position
        if data[position] == _OPERAND:
            weight, prefix = data[position + 1], data[position + 2]
            lexeme, self._position = _lexeme(data, position + 3)
            marks = ("*" if prefix else "") + "".join(letter for bit, letter in _WEIGHT_BITS if weight & bit)
            return f"{lexeme}:{marks}" if marks else lexeme
        operator = data[position + 1]
        if data[position] != _OPERATOR or not _NOT <= operator <= _PHRASE:
            raise ValueError("incorrect binary data format of tsquery")
        self._position = position + 2
        distance = 0
        if operator == _PHRASE:
            (distance,) = _UINT16.unpack_from(data, self._position)
            self._position += 2
        return operator, distance


def _enclosed(text: str, operator: int, outer: int, *, right: bool = False) -> str:
    """Add parentheses where the inner operator binds less than the outer one, and always around the right one of two phrases."""
    if operator == 0:
        return text
    priorities = dict(_PRIORITIES)
    inner, around = priorities[operator], priorities[outer]
    if inner < around or (operator == _PHRASE and outer == _PHRASE and right):
        return f"( {text} )"
    return text


def tsquery_text(data: bytes) -> str:
    """Operands and operators, with parentheses where needed."""
    return _Query(data).text()
