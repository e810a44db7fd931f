"""The JSON schema of the configuration file, for editors, generated from the declarations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from subscriber.config.file.sections import APPLIER, LOG, NAMES, PROGRAM, REQUIRED, SUBSCRIPTION, TARGET
from subscriber.config.option import Option
from subscriber.config.parameters import PARAMETERS
from subscriber.config.reading import BOOLEAN, STRING, WHOLE
from subscriber.config.settings import SETTINGS

__all__ = ["json_schema"]

_SWITCH: Final = frozenset({"on", "true"})


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12)."""
    settings = _object("settings", SETTINGS)
    target = _object("a target", TARGET, applier=_object("options of spark-apply, for a lake", APPLIER))
    subscription = _object(
        "a subscription", SUBSCRIPTION, options=_object("parameters of CREATE SUBSCRIPTION", PARAMETERS), settings=settings
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration file of subscriber",
        **_object(
            "",
            PROGRAM,
            log=_object("the program's log", LOG),
            settings={**settings, "description": "settings of all subscriptions"},
            targets={"type": "object", "description": "targets, by name", "additionalProperties": target},
            subscriptions={"type": "object", "description": "subscriptions, by name", "additionalProperties": subscription},
        ),
    }


def _object(description: str, known: Mapping[str, Option], **tables: Any) -> dict[str, Any]:
    required = [name for name, each in known.items() if each.default_text == REQUIRED]
    return {
        **({"description": description} if description else {}),
        "type": "object",
        "properties": {name: _property(each) for name, each in known.items()} | tables,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _property(each: Option) -> dict[str, Any]:
    text = each.help if each.default_text == REQUIRED else f"{each.help} (default: {each.shown_default})"
    return {"description": text, **_type(each)}


def _type(each: Option) -> dict[str, Any]:
    if each.keyed:
        return {"type": "object"}
    if each.type.words:
        switch = [True, False] if _SWITCH & {*each.type.words} else []
        return {"enum": [*each.type.words, *switch]}
    if each.type is NAMES:
        return {"type": "array", "items": {"type": "string"}, "minItems": 1}
    if each.type is BOOLEAN:
        return {"type": "boolean"}
    if each.type is STRING:
        return {"type": ["string", "number"]}
    if each.type is WHOLE:
        most = each.type.most if each.most is None else each.most
        bounds = {"minimum": each.least, "maximum": most}
        return {"type": "integer", **{name: int(bound) for name, bound in bounds.items() if bound is not None}}
    # a time, a size, a rate: a number with or without its unit; copy_data: true, false or a word
    return {"type": ["string", "number", "boolean"] if each.type.unit is None else ["string", "number"]}
