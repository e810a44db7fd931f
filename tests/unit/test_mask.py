"""Masking of texts in which a value can hide from a simple replacement."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from subscriber.recording.mask import Mask

JSON, XML = 114, 142
MASK = Mask(b"a secret of the test")


def test_escaped_characters_of_json_are_replaced() -> None:
    value = {"имя": "Иван Петров", "emoji": "\U0001f600", "plain": 'a"b\\c\n'}
    text = json.dumps(value)
    assert "\\u0418" in text
    masked = MASK.value(JSON, text.encode()).decode()
    found = json.loads(masked)
    assert len(masked) == len(text)
    assert not {"имя", "Иван Петров", "\U0001f600"} & {*found, *found.values()}
    assert "\\u0418\\u0432\\u0430\\u043d" not in masked


@pytest.mark.parametrize(
    "text",
    [
        "<a name='John'>John</a>",
        '<a name="John &amp; >John" other = "1 < John"/>'.replace("1 <", "1 &lt;"),
        "<a><!-- John --><![CDATA[<John>]]></a>",
        "<?xml version='1.0'?><a xmlns:n='http://John'><n:b n:c='John'/></a>",
    ],
)
def test_attributes_comments_and_sections_of_xml_are_replaced(text: str) -> None:
    masked = MASK.value(XML, text.encode()).decode()
    assert "John" not in masked
    assert len(masked) == len(text)
    assert [each.tag.rpartition("}")[2] for each in ElementTree.fromstring(masked).iter()] == [
        each.tag.rpartition("}")[2] for each in ElementTree.fromstring(text).iter()
    ]
