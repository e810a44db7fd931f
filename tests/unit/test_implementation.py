"""The two forms of the compiled core give the same results and the same errors, on valid, mutated and random payloads.

``SUBSCRIBER_FUZZ`` is the number of payloads; see ``make fuzz``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest

from subscriber._implementation import MODULES, VARIABLE, compiled_file, source_file
from subscriber.errors import ProtocolError
from subscriber.protocol.frames import PAYLOAD
from subscriber.protocol.messages import BINARY, TEXT, UNCHANGED, Tag
from subscriber.protocol.tuples import records_alike
from subscriber.transaction.model import PreparedTransaction, Transaction
from tests.support.column_arrays import array_of
from tests.unit.transaction.publisher_model import Publisher

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_HEADER = struct.pack(">IcH", 16384, b"N", 4)
_OLD_HEADER = _HEADER.replace(b"N", b"O")
_FUZZ = os.environ.get("SUBSCRIBER_FUZZ", "")
_PAYLOADS = int(_FUZZ) if _FUZZ.isdecimal() else 20_000


def _load(module: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    # dataclasses look for the module of a class by its name
    importlib.import_module(module)
    spec.loader.exec_module(found)
    return found


def _forms(module: str) -> list[ModuleType]:
    """The module as Python and as C."""
    if not os.path.exists(compiled_file(module)):
        # without a compiler there is nothing to compare; with one, installation must have compiled it
        assert shutil.which("gcc") is None, "install the project again, which compiles the core"
        pytest.skip("there is no C compiler")
    return [_load(module, source_file(module)), _load(module, compiled_file(module))]


def _value(kind: bytes, value: bytes) -> bytes:
    return kind + struct.pack(">I", len(value)) + value


def _values(rng: random.Random) -> list[bytes]:
    return [
        rng.choice((b"n", b"u", _value(b"t", rng.randbytes(rng.randrange(6))), _value(rng.choice((b"t", b"b")), rng.randbytes(3))))
        for _ in range(4)
    ]


def _insert(rng: random.Random) -> bytes:
    return b"I" + _HEADER + b"".join(_values(rng))


def _full_update(rng: random.Random) -> bytes:
    """With the whole old row, which has the same first value more often than not."""
    old, new = _values(rng), _values(rng)
    if rng.random() < 0.8:
        new[0] = old[0]
    return b"U" + _OLD_HEADER + b"".join(old) + b"N" + _HEADER[-2:] + b"".join(new)


def _mutated(rng: random.Random, payload: bytes) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.randrange(3)):
        match rng.randrange(4):
            case 0:
                del data[rng.randrange(len(data) + 1) :]
            case 1 if data:
                data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256), *b"ntub"))
            case 2:
                place = rng.randrange(len(data) + 1)
                data[place:place] = rng.randbytes(rng.randrange(1, 5))
            case _ if len(data) > 13:
                data[9:13] = rng.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\1", rng.randbytes(4)))
    return bytes(data)


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ProtocolError as error:
        return str(error), error.offset, error.tag


def _histories(make: Callable[[random.Random], bytes] = _insert) -> Iterator[list[bytes]]:
    rng = random.Random(17)
    for _ in range(_PAYLOADS // 20):
        yield [_mutated(rng, make(rng)) if rng.random() < 0.5 else make(rng) for _ in range(20)]


def test_both_forms_read_the_same() -> None:
    python, c = _forms("subscriber.protocol.tuples")
    read = 0
    for records in _histories():
        for record in records:
            expected = _outcome(lambda record=record: python.read_tuple(record, 6))  # type: ignore[misc]
            assert _outcome(lambda record=record: c.read_tuple(record, 6)) == expected  # type: ignore[misc]
        for kinds in (bytes([TEXT] * 4), bytes([BINARY] * 4), bytes([TEXT, UNCHANGED, TEXT, BINARY])):
            for place in range(len(records)):
                arguments = {"tag": int(Tag.INSERT), "offset": 1, "parts": ((_HEADER, kinds),), "size": 40}
                rows = python.read_rows(records, range(place, len(records)), **arguments)
                assert c.read_rows(records, range(place, len(records)), **arguments) == rows
                alike = python.records_alike(records, range(place, len(records)), **arguments)
                assert alike == c.records_alike(records, range(place, len(records)), **arguments) == records[place : place + len(rows)]
                read += len(rows)
        for place in range(len(records)):
            end = len(records)
            for most in (100, 10**6):
                assert c.places_by_header(records, place, end, 1, most) == python.places_by_header(records, place, end, 1, most)
    assert read > _PAYLOADS // 20


def test_both_forms_read_the_same_full_updates() -> None:
    python, c = _forms("subscriber.protocol.tuples")
    read = 0
    for records in _histories(_full_update):
        for kinds in (bytes([TEXT] * 4), bytes([TEXT, UNCHANGED, TEXT, BINARY])):
            for place in range(len(records)):
                parts = (_OLD_HEADER, bytes([TEXT] * 4)), (b"N" + _HEADER[-2:], kinds)
                arguments = {"tag": int(Tag.UPDATE), "offset": 1, "parts": parts, "size": 99}
                rows = python.read_rows(records, range(place, len(records)), **arguments)
                assert c.read_rows(records, range(place, len(records)), **arguments) == rows
                read += len(rows)
    assert read > _PAYLOADS // 200


def test_both_forms_read_the_same_columns() -> None:
    python, c = _forms("subscriber.sinks.postgres.apply.arrays")
    inserts = ((_HEADER, bytes([TEXT, TEXT, BINARY, UNCHANGED])),)
    updates = ((_OLD_HEADER, bytes([TEXT] * 4)), (b"N" + _HEADER[-2:], bytes([TEXT, UNCHANGED, TEXT, BINARY])))
    read = 0
    for make, tag, parts in ((_insert, Tag.INSERT, inserts), (_full_update, Tag.UPDATE, updates)):
        for records in _histories(make):
            for place in range(len(records)):
                some = records_alike(records, range(place, len(records)), tag=int(tag), offset=1, parts=parts, size=99)
                if not some:
                    continue
                for columns, first in itertools.product(((0,), (2, 1), (3, 0)), (False, True)):
                    expected = python.column_values(some, 1, parts, columns, first=first)
                    assert c.column_values(some, 1, parts, columns, first=first) == expected
                    assert len(expected) == len(some)
                wanted = [(0, 25, True), (1, 0, False), (2, 17, True), (3, 25, True)]
                assert c.column_arrays(some, 1, parts, wanted) == python.column_arrays(some, 1, parts, wanted)
                read += len(some)
    assert read > _PAYLOADS // 200


def test_both_forms_find_the_same_payloads() -> None:
    python, c = _forms("subscriber.protocol.frames")
    rng = random.Random(18)
    for records in _histories():
        frames = [_mutated(rng, struct.pack(">cQQq", b"w", 1, 2, 3)) + record for record in records]
        tags = frozenset({int(Tag.INSERT)})
        assert c.payloads(list(frames), 0, tags) == python.payloads(list(frames), 0, tags)
        for frame in frames:
            outcomes = [_outcome(lambda form=form, frame=frame: repr(form.decode_frame(frame))) for form in (python, c)]  # type: ignore[misc]
            assert outcomes[0] == outcomes[1]


def _told(output: object) -> object:
    transaction = output.transaction if isinstance(output, PreparedTransaction) else output
    if not isinstance(transaction, Transaction):
        return output
    return type(output), [getattr(transaction, name) for name in Transaction.__slots__ if name != "spool"]


def _assembled(module: ModuleType, frames: list[bytes]) -> tuple[list[object], int]:
    """The results of a stream, up to its first error."""
    reassembly = module.Reassembly()
    found: list[object] = []
    place = 0
    try:
        while place < len(frames):
            whole, place = reassembly.feed_frames(frames, place)
            found += [(_told(transaction), lsn) for transaction, lsn in whole]
            if place < len(frames):
                found += map(_told, reassembly.feed(frames[place][PAYLOAD:]))
                place += 1
            if place % 9 == 0:
                found.append(reassembly.spill())
    except ProtocolError as error:
        found.append((str(error), error.offset, error.tag))
    return found, reassembly.memory


def test_both_forms_assemble_the_same_transactions() -> None:
    python, c = _forms("subscriber.transaction.reassembly")
    rng = random.Random(20)
    done = failed = 0
    while done < _PAYLOADS:
        sent = [payload for payload in Publisher(rng.randbytes(rng.randrange(20, 200))).sent if payload is not None]
        mutations = rng.choice((0, 0, 0.01, 0.1))
        payloads = [_mutated(rng, payload) if rng.random() < mutations else payload for payload in sent]
        frames = [struct.pack(">cQQq", b"w", place, place, 3) + payload for place, payload in enumerate(payloads)]
        expected = _assembled(python, list(frames))
        assert _assembled(c, list(frames)) == expected
        done += len(frames)
        failed += isinstance(expected[0][-1], tuple) and isinstance(expected[0][-1][0], str)
    assert failed


def test_both_forms_write_the_same_arrays() -> None:
    python, c = _forms("subscriber.sinks.postgres.apply.arrays")
    rng = random.Random(19)
    for _ in range(1000):
        values = [rng.choice((None, rng.randbytes(rng.randrange(5)), b'"\\', b"NULL", b"")) for _ in range(rng.randrange(1, 6))]
        assert array_of(values, 25, binary=True, form=c) == array_of(values, 25, binary=True, form=python)
        assert c.text_array(values, b",") == python.text_array(values, b",")
        texts = [b"%d" % rng.randint(-(2 ** rng.randrange(70)), 2 ** rng.randrange(70)), *values]
        for size in (2, 4, 8):
            oid = {2: 21, 4: 23, 8: 20}[size]
            assert [array_of([text], oid, form=c) for text in texts] == [_integer(text, size, oid) for text in texts]


def _integer(text: bytes | None, size: int, oid: int) -> bytes | None:
    header = struct.pack(">iiIii", 1, text is None, oid, 1, 1)
    if text is None:
        return header + b"\xff" * 4
    if not re.fullmatch(rb"-?[0-9]{1,18}", text) or not -(256**size) <= 2 * int(text) < 256**size:
        return None
    return header + size.to_bytes(4) + int(text).to_bytes(size, signed=True)


def test_dates_and_times_are_converted() -> None:
    _, c = _forms("subscriber.sinks.postgres.apply.arrays")
    rng = random.Random(20)
    for _ in range(1000):
        zone = timezone(timedelta(seconds=rng.choice((0, 3600, -12600, 2712, -2712))))
        time = (datetime(1001, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(8990 * 365 * 86_400_000_000))).astimezone(zone)
        time = time.replace(microsecond=rng.choice((0, time.microsecond, 120_000)))
        seconds, _, rest = str(time).partition(".")
        text = f"{seconds}.{rest[:6].rstrip('0')}{rest[6:]}" if rest else seconds
        without_zone = re.sub("[+-][0-9:]*$", "", text)
        for oid, size, written, number in (
            (1082, 4, text[:10], (time.date() - EPOCH.date()).days),
            (1114, 8, without_zone, (time.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)),
            (1184, 8, text, (time - EPOCH) // timedelta(microseconds=1)),
        ):
            found = array_of([written.encode()], oid, form=c)
            assert found is not None
            assert found[20:] == size.to_bytes(4) + number.to_bytes(size, signed=True)


def test_numerics_are_converted() -> None:
    _, c = _forms("subscriber.sinks.postgres.apply.arrays")
    rng = random.Random(21)
    for _ in range(2000):
        whole, scale = rng.randrange(1, 40), rng.randrange(0, 40)
        digits = "".join(rng.choices("0123456789" if rng.random() < 0.7 else "09", k=whole + scale))
        text = f"{rng.choice(('', '-'))}{digits[:whole]}{'.' if scale else ''}{digits[whole:]}"
        found = array_of([text.encode()], 1700, form=c)
        assert found is not None
        length, count, weight, sign, kept = struct.unpack_from(">IHhHH", found, 20)
        groups = struct.unpack_from(f">{count}H", found, 32)
        assert (length, len(found), kept) == (8 + 2 * count, 32 + 2 * count, scale)
        value = sum(Fraction(group) * Fraction(10000) ** (weight - place) for place, group in enumerate(groups))
        assert (-value if sign == 0x4000 else value) == Fraction(text)
        assert max(groups) < 10000


def _run(form: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, VARIABLE: form}, capture_output=True, text=True, check=False, timeout=60
    )


def test_selection() -> None:
    code = "import subscriber._implementation as i, subscriber.protocol.tuples as t; print(i.implementation(), t.__file__)"
    assert _run("python", code).stdout.split() == ["python", (source_file("subscriber.protocol.tuples"))]
    assert _run("", "from subscriber.cli.main import main; main(['--version'])").returncode == 0
    refused = _run("rust", code)
    assert refused.returncode != 0
    assert f'invalid value for {VARIABLE}: "rust"' in refused.stderr
    _forms("subscriber.protocol.tuples")
    assert _run("c", code).stdout.split() == ["c", (compiled_file("subscriber.protocol.tuples"))]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_is_compiled(module: str) -> None:
    python, c = _forms(module)
    assert c.__file__ != python.__file__
    assert set(python.__all__) <= set(dir(c))
