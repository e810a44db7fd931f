"""Characters that command a terminal, or hide, are escaped; others stay."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata

import pytest

from subscriber.cli.service.logs import LogFormatter
from subscriber.errors import TargetError
from subscriber.printable import printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Tür 表 🎉 ́ \u00a0", "Tür 表 🎉 ́ \u00a0"),
        ("a\x1b[31mb\x7f\x9b\n", "a\\u001b[31mb\\u007f\\u009b\\u000a"),
        ("\u202eabc\u2066\u200f\u061c\u2028", "\\u202eabc\\u2066\\u200f\\u061c\\u2028"),
        ("\ufeff\u200b\U000e0041", "\\ufeff\\u200b\\udb40\\udc41"),
        ("\udcff", "\\udcff"),
    ],
)
def test_escaped_characters(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_every_control_and_format_character() -> None:
    kept = []
    for character in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
            assert printable(character) != character
        else:
            kept.append(character)
    assert printable("".join(kept)) == "".join(kept)


def test_kept_characters() -> None:
    assert printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\u000d"


def test_escapes_mean_the_same_in_json() -> None:
    text = "".join(map(chr, [*range(0x20, 0x100), 0x202E, 0xE0041]))
    assert json.loads(printable(json.dumps(text, ensure_ascii=False))) == text


def test_errors_hold_no_control_characters() -> None:
    error = TargetError("table \x1b[2Jt\nbroke", hint="look\x9bat it")
    error.add_note("in \u202eevil")
    error.hint = (error.hint or "") + "\x07"
    assert str(error) == "table \\u001b[2Jt\nbroke"
    assert error.one_line() == "table \\u001b[2Jt broke; in \\u202eevil (hint: look\\u009bat it\\u0007)"


def test_a_log_message_is_one_line() -> None:
    record = logging.LogRecord("subscriber", logging.WARNING, "", 0, "table %s", ("a\x1b[31m\n2026 ERROR forged",), None)
    assert LogFormatter("%(levelname)s %(message)s").format(record) == "WARNING table a\\u001b[31m\\u000a2026 ERROR forged"


def test_a_traceback_is_part_of_the_line() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        record = logging.LogRecord("subscriber", logging.ERROR, "", 0, "it broke", (), sys.exc_info())
    text = LogFormatter("%(message)s").format(record)
    assert text.startswith("it broke | Traceback (most recent call last): | ")
    assert text.endswith("ValueError: \\u001b[2J")
    assert "\n" not in text
