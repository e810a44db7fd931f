"""Replaces the values in received messages, so that a recording can be given to others.

Each value is replaced by another one of the same type, length and form, by permutations that a secret key determines. The key is not
stored. Equal values of a type stay equal, and different ones stay different, so keys still identify their rows and the masked recording
can be replayed. Some keep a part: signs, zeros, exponents, centuries,
infinities, the month of days after the 28th, punctuation and the lengths of texts; floats and times near their limits stay.

Not masked: the names of schemas, tables, columns, types, origins and prepared transactions; those of XML elements
and attributes, and processing instructions; LSNs, times of commits, transaction IDs.
The content of logical messages is replaced by ``x``.

Values of types that are not built in are treated as text. An enum's labels are replaced too: to replay them, the target's columns must be
of type text. Ranges become empty.
"""

from __future__ import annotations

import hashlib
import ipaddress
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.protocol.decoder import Decoder
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import XLogData, decode_frame, encode_frame
from subscriber.protocol.messages import BINARY, Delete, Insert, LogicalMessage, Message, Relation, TupleData, Update
from subscriber.types.builtin import builtin_facts
from subscriber.types.pg_type import TypeKind

__all__ = ["Mask"]

_DIGITS, _NONZERO, _HEX = "0123456789", "123456789", "0123456789abcdef"
_LOWER, _UPPER = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PLACES: Final = 64
"""Characters at other places of a text have other replacements; they repeat after this many."""
_BLOCK: Final = 64
_BLOCKS: Final = 0xC0
"""From this code on, a character is replaced within its block of 64."""
_FACTS: Final = {fact.oid: fact for fact in builtin_facts()}
_LIMITS: Final = {
    "int2": 2**15 - 1,
    "int4": 2**31 - 1,
    "int8": 2**63 - 1,
    "oid": 2**32 - 1,
    "xid": 2**32 - 1,
    "cid": 2**32 - 1,
    "xid8": 2**64 - 1,
}
_TEXTS: Final = frozenset({"text", "varchar", "bpchar", "char", "name", "refcursor"})
_TIMES: Final = frozenset({"date", "time", "timetz", "timestamp", "timestamptz", "interval"})
_NAMES: Final = frozenset({fact.name for fact in _FACTS.values() if fact.name.startswith("reg")} | {"aclitem"})
_CONSTANTS: Final = {"jsonpath": "$", "txid_snapshot": "1:1:", "pg_snapshot": "1:1:", "tid": "(0,1)"}
"""Types with one value for all: any other one could be invalid."""
_DATE: Final = re.compile(r"(\d\d)(\d\d)-(\d\d)-(\d\d)")
_CLOCK: Final = re.compile(r"(\d\d+):(\d\d)(?::(\d\d)(?:\.(\d+))?)?")
_NUMBER: Final = re.compile(r"(\d+)((?:\.\d*)?)((?:[eE][-+]?\d+)?)")
_WORDS: Final = frozenset({"true", "false", "null", "NULL"})
_TOKEN: Final = re.compile(r"\\u[0-9A-Fa-f]{4}|\\.|[^\W\d_]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![^\W\d_])|\d|.", re.DOTALL)
_ITEM: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[^{},;"]+', re.DOTALL)
_ADDRESS: Final = re.compile(r"(\d+(?=\.)|(?<=\.)\d+)|([0-9a-f]+)")
_LEXEME: Final = re.compile(r"'(?:[^']|'')*'")
_MARKUP: Final = re.compile(r"""<!--.*?-->|<!\[CDATA\[.*?\]\]>|<\?.*?\?>|<(?:[^>"']|"[^"]*"|'[^']*')*>|&[^;\s]*;|[^<&]+|.""", re.DOTALL)
_ATTRIBUTE: Final = re.compile(r"""(?<==)\s*(?:"[^"]*"|'[^']*')""")
_LARGE_EXPONENT: Final = 36
_LARGE_TIME: Final = re.compile(r"(?<![.\d])\d{5}")
"""Values near the limits of their type are kept."""
_KEPT_HOURS: Final = 24
_LAST_DAY: Final = 28


class Mask:
    """Masks the messages of one recording, in their order.

    Args:
        key: the secret. The same key gives the same replacements.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._tables: dict[tuple[str, str], dict[str, str]] = {}
        self._relations: dict[int, Relation] = {}
        self._decoder = Decoder()

    def begin_session(self) -> None:
        """Forget the state of the last session. The replacements stay the same."""
        self._relations, self._decoder = {}, Decoder()

    def __call__(self, frame: bytes) -> bytes:
        """Mask the content of a CopyData message.

        Raises:
            ProtocolError: it is not pgoutput.
            ConfigurationError: a value is in binary format.
        """
        decoded = decode_frame(frame)
        if not isinstance(decoded, XLogData):
            return frame
        message = self._decoder.decode(decoded.payload)
        if isinstance(message, Relation):
            self._relations[message.relation_id] = message
        masked = self._masked(message)
        if masked is None:
            return frame
        payload = encode(masked, in_stream=self._decoder.in_stream)
        return encode_frame(XLogData(decoded.start_lsn, decoded.end_lsn, decoded.send_time, payload))

    def _masked(self, message: Message) -> Message | None:
        """The message with other values. None: it has none."""
        match message:
            case Insert(relation_id, new):
                return Insert(relation_id, self._row(relation_id, new), message.xid)
            case Update(relation_id, key, old, new):
                rows = self._old_row(relation_id, key), self._old_row(relation_id, old), self._row(relation_id, new)
                return Update(relation_id, *rows, message.xid)
            case Delete(relation_id, key, old):
                return Delete(relation_id, self._old_row(relation_id, key), self._old_row(relation_id, old), message.xid)
            case LogicalMessage():
                return replace(message, content=b"x" * len(message.content))
            case _:
                return None

    def _old_row(self, relation_id: int, row: TupleData | None) -> TupleData | None:
        return None if row is None else self._row(relation_id, row)

    def _row(self, relation_id: int, row: TupleData) -> TupleData:
        if BINARY in row.kinds:
            raise ConfigurationError("values in binary format cannot be masked", hint="record with -o binary=false")
        relation = self._relations.get(relation_id)
        oids = [column.type_oid for column in relation.columns] if relation is not None else []
        oids += [0] * (len(row.values) - len(oids))
        values = [None if value is None else self.value(oid, value) for oid, value in zip(oids, row.values, strict=False)]
        return TupleData(row.kinds, values)

    def value(self, oid: int, value: bytes) -> bytes:
        """Mask one value, in text format, of the type with this oid."""
        text = value.decode("utf-8", "surrogateescape")
        return self._text(oid, text).encode("utf-8", "surrogateescape")

    def _text(self, oid: int, text: str) -> str:
        fact = _FACTS.get(oid)
        if fact is None:
            return self._letters(text)
        match fact.kind:
            case TypeKind.RANGE:
                return "empty"
            case TypeKind.MULTIRANGE:
                return "{}"
            case TypeKind.ARRAY:
                return self._array(fact.element, text)
        return self._scalar(fact.name, text)

    def _scalar(self, name: str, text: str) -> str:
        if name in _LIMITS:
            return self._integer(text, _LIMITS[name])
        if name in _TEXTS:
            return self._letters(text)
        if name in _TIMES:
            return self._time(text, interval=name == "interval")
        if name in _NAMES:
            return text
        match name:
            case _ if name in _CONSTANTS:
                return _CONSTANTS[name]
            case "tsvector" | "tsquery":
                return _LEXEME.sub(lambda lexeme: self._letters(lexeme[0]), text)
            case "oidvector" | "int2vector":
                limit = _LIMITS["oid" if name == "oidvector" else "int2"]
                return " ".join(self._integer(number, limit) for number in text.split(" "))
            case "money":
                digits = iter(self._integer("".join(filter(str.isdigit, text)), _LIMITS["int8"]))
                return "".join(next(digits) if one.isdigit() else one for one in text)
            case "bool":
                return "tf"["ft".index(text)] if self._table("bool", "01")["0"] == "1" and text in {"t", "f"} else text
            case "bytea":
                return "\\x" + self._characters("hex", text[2:], (_HEX,)) if text.startswith("\\x") else self._letters(text)
            case "uuid" | "macaddr" | "macaddr8":
                return self._characters("hex", text, (_HEX,))
            case "bit" | "varbit":
                return self._characters("bit", text, ("01",))
            case "json" | "jsonb":
                return self._json(text)
            case "xml":
                return "".join(map(self._xml, _MARKUP.findall(text)))
            case "inet" | "cidr":
                return self._address(text, network=name == "cidr")
            case _:
                return self._numbers(text)

    # --- forms

    def _letters(self, text: str) -> str:
        return self._characters("text", text, (_LOWER, _UPPER, _DIGITS))

    def _json(self, text: str) -> str:
        # a word of a string may be left as it is, too: true, false, null
        return "".join(
            part
            if part in _WORDS
            else self._escaped(part)
            if part[0] == "\\"
            else self._numbers(part)
            if part[0].isascii() and part[0].isdigit()
            else self._letters(part)
            for part in _TOKEN.findall(text)
        )

    def _escaped(self, part: str) -> str:
        """An escape of a JSON string. A surrogate stays in its half of the pair."""
        if part[1] != "u":
            return part
        code = int(part[2:], 16)
        return f"\\u{self._within_block(code) if code >= _BLOCKS else ord(self._letters(chr(code))):04x}"

    def _xml(self, part: str) -> str:
        """A part of an XML value. Of a tag, the names stay; comments, CDATA sections and the values of attributes do not."""
        if part.startswith(("<!--", "<![CDATA[")):
            begin = part.index("[", 3) + 1 if part.startswith("<!") and part[2] == "[" else 4
            return part[:begin] + self._letters(part[begin:-3]) + part[-3:]
        if part[0] == "<" and not part.startswith("<?"):
            return _ATTRIBUTE.sub(lambda value: "".join(map(self._xml, _MARKUP.findall(value[0]))), part)
        return part if part[0] in "<&" else self._letters(part)

    def _array(self, element: int, text: str) -> str:
        bounds, equals, items = text.partition("=") if text.startswith("[") else ("", "", text)

        def item(match: re.Match[str]) -> str:
            if not match[0].startswith('"'):
                return match[0] if match[0] == "NULL" else self._text(element, match[0])
            plain = re.sub(r"\\(.)", r"\1", match[0][1:-1], flags=re.DOTALL)
            return '"' + re.sub(r'(["\\])', r"\\\1", self._text(element, plain)) + '"'

        return bounds + equals + _ITEM.sub(item, items)

    def _integer(self, text: str, limit: int) -> str:
        sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
        if not digits.isascii() or not digits.isdigit():
            return text
        found = digits
        while True:  # applied again until the result fits: still a permutation
            found = self._number(found)
            if int(found) <= limit:
                return sign + found

    def _numbers(self, text: str) -> str:
        def number(match: re.Match[str]) -> str:
            whole, fraction, exponent = match.groups()
            if exponent and abs(int(exponent[1:])) > _LARGE_EXPONENT:
                return match[0]
            return self._number(whole) + self._characters("fraction", fraction, (_DIGITS,)) + exponent

        return _NUMBER.sub(number, text)

    def _number(self, digits: str) -> str:
        """Digits with the same number of leading zeros."""
        zeros = len(digits) - len(digits.lstrip("0"))
        if zeros == len(digits):
            return digits
        first = self._table(f"first {len(digits)}", _NONZERO)[digits[zeros]]
        return digits[:zeros] + first + self._characters(f"digits {len(digits)}", digits[zeros + 1 :], (_DIGITS,))

    def _time(self, text: str, *, interval: bool) -> str:
        place = _CLOCK.search(text)
        before, clock, after = (text, "", "") if place is None else (text[: place.start()], place[0], text[place.end() :])
        if text.endswith("BC") or _LARGE_TIME.search(text):
            return text
        before = self._numbers(before) if interval else _DATE.sub(self._date, before)
        if place is None:
            return before
        hour, minute, second, fraction = place.groups()
        if interval:
            hour = self._number(hour)
        elif int(hour) == _KEPT_HOURS:
            return before + clock + after
        else:
            hour = self._one_of("hour", 24, hour)
        clock = f"{hour}:{self._one_of('minute', 60, minute)}"
        if second is not None:
            clock += f":{self._one_of('second', 60, second)}"
        if fraction is not None:
            clock += f".{self._characters('fraction', fraction, (_DIGITS,))}"
        return before + clock + after

    def _date(self, match: re.Match[str]) -> str:
        century, year, month, day = match.groups()
        if int(day) > _LAST_DAY:
            return match[0] if month == "02" else f"{century}{self._year(century, year)}-{month}-{day}"
        return f"{century}{self._year(century, year)}-{self._one_of('month', 12, month, 1)}-{self._one_of('day', 28, day, 1)}"

    def _year(self, century: str, year: str) -> str:
        return year if not int(century) else self._one_of("year", 100, year)

    def _one_of(self, label: str, count: int, text: str, first: int = 0) -> str:
        domain = [f"{number:02}" for number in range(first, first + count)]
        return self._table(label, domain)[text]

    def _address(self, text: str, *, network: bool) -> str:
        address, slash, prefix = text.partition("/")

        def group(match: re.Match[str]) -> str:
            octet, hexadecimal = match.groups()
            if hexadecimal is not None:
                return self._characters("group", hexadecimal, (_HEX[1:],))
            return self._table("octet", [str(number) for number in range(1, 256)]).get(octet, octet)

        masked = _ADDRESS.sub(group, address) + slash + prefix
        if network:
            try:
                ipaddress.ip_network(masked)
            except ValueError:
                return text  # a prefix that ends within an octet
        return masked

    # --- permutations

    def _characters(self, label: str, text: str, alphabets: Sequence[Sequence[str]]) -> str:
        tables = [self._position(label, place, alphabets) for place in range(min(len(text), _PLACES))]
        return "".join(tables[place % _PLACES].get(one) or self._other(label, one) for place, one in enumerate(text))

    def _position(self, label: str, place: int, alphabets: Sequence[Sequence[str]]) -> Mapping[str, str]:
        key = (f"{label} at {place}", "")
        if key not in self._tables:
            table: dict[str, str] = {}
            for alphabet in alphabets:
                table |= self._table(f"{label} at {place} of {alphabet[0]}", alphabet)
            self._tables[key] = table
        return self._tables[key]

    def _other(self, label: str, character: str) -> str:
        """Punctuation stays. Other letters are replaced within their block of 64 characters."""
        code = ord(character)
        if label != "text" or code < _BLOCKS or 0xD800 <= code < 0xE000:
            return character
        return chr(self._within_block(code))

    def _within_block(self, code: int) -> int:
        block = [str(number) for number in range(_BLOCK)]
        return code - code % _BLOCK + int(self._table("block", block)[str(code % _BLOCK)])

    def _table(self, label: str, domain: Sequence[str]) -> dict[str, str]:
        key = (label, "table")
        if key not in self._tables:
            shuffled = list(domain)
            seed = hashlib.blake2b(label.encode(), key=self._key[:64]).digest()
            random.Random(seed).shuffle(shuffled)  # noqa: S311 -- the seed is the secret
            self._tables[key] = dict(zip(domain, shuffled, strict=True))
        return self._tables[key]
