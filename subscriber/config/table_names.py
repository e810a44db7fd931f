"""Names of tables in options, written as in SQL, and options that have a value for each table (``OPTION.SCHEMA.TABLE=VALUE``).

Such an option is given once for each table, or as a mapping in Python. It is kept, and stored in the target's catalog, as one text: a JSON
object with a value for each table, in the order of the tables' names. The key may also be something else, as that of ``conflict``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from subscriber.errors import ConfigurationError

__all__ = [
    "IDENTIFIER",
    "Name",
    "TableOption",
    "compiled_pattern",
    "pattern_parts",
    "patterns_of",
    "read_identifier",
    "read_name",
    "written",
    "written_name",
]

Name = tuple[str, str]
"""Schema and name."""

# letters, _ and all beyond ASCII; then digits and $ too. Written as what is excluded: a range up to 10ffff takes 10 ms to compile
IDENTIFIER: Final = r'(?:[^\0-@\[-^`{-\x7f][^\0-#%-/:-@\[-^`{-\x7f]*|"(?:[^"\0]|"")+")'
_NAME: Final = re.compile(rf"\s*({IDENTIFIER})\s*\.\s*({IDENTIFIER})\s*")
_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_$]*")
_SPECIAL: Final = frozenset("|*+?()[]{}.^\\")


@dataclass(frozen=True, slots=True)
class TableOption:
    """An option with a value for each table.

    Attributes:
        name: of the option.
        example: shown in errors.
        most: the largest number of characters of the stored text.
        too_long: the message about a longer text, and what to do.
        key: reads the name of a table, and returns it as it is stored.
        value: reads the value of a key, and returns it as it is stored.
        keys: what the keys are.
    """

    name: str
    example: str
    most: int
    too_long: tuple[str, str]
    key: Callable[[str], str]
    value: Callable[[str, str], str] = lambda _, text: text.strip()
    keys: str = "the name of a table"

    def parse(self, name: str, text: str) -> str:
        """Read the stored text.

        Raises:
            ConfigurationError: it is not one.
        """
        try:
            values = json.loads(text) if text not in {"", "none"} else {}
        except ValueError:
            values = None
        if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
            raise ConfigurationError(f"{name} requires {self.keys}", hint=f"as in {self.example}")
        return self.changed("", values)

    def changed(self, stored: str, changes: Mapping[str, object]) -> str:
        """Return the stored text with changes by table. An empty value removes the table's.

        Raises:
            ConfigurationError: a name or a value is not valid, or there are too many.
        """
        if not isinstance(changes, Mapping):
            raise ConfigurationError(f"{self.name} is not a mapping", hint=f"as in {self.example}")
        changed: dict[str, str] = {}
        for table, value in changes.items():
            key = self.key(table)
            if not isinstance(value, str) or "\0" in value:
                wrong = "has a null character" if isinstance(value, str) else "is not a text"
                raise ConfigurationError(f"{self.name}.{key} {wrong}", hint=f"as in {self.example}")
            if key in changed:
                raise ConfigurationError(f'conflicting or redundant options: "{self.name}.{key}" is given twice', hint="specify it once")
            changed[key] = self.value(key, value) if value.strip() else ""
        values = {**self.values(stored), **changed}
        kept = {table: values[table] for table in sorted(values) if values[table]}
        text = json.dumps(kept, ensure_ascii=False) if kept else ""
        if len(text) > self.most:
            message, hint = self.too_long
            raise ConfigurationError(message, hint=hint)
        return text

    def values(self, stored: str) -> dict[str, str]:
        """The values by table, as they are stored."""
        return dict(json.loads(stored)) if stored else {}


def read_name(text: str, example: str) -> Name:
    """Read ``schema.table``.

    Raises:
        ConfigurationError: it has another form.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise ConfigurationError(f'"{text}" is not of the form schema.table', hint=f"as in {example}")
    return read_identifier(match[1]), read_identifier(match[2])


def read_identifier(text: str) -> str:
    """Read an identifier: in double quotes, or converted to lower case."""
    return text[1:-1].replace('""', '"') if text.startswith('"') else text.lower()


def written(identifier: str) -> str:
    """The identifier as it is written in SQL."""
    return identifier if _PLAIN.fullmatch(identifier) else '"' + identifier.replace('"', '""') + '"'


def written_name(name: Name) -> str:
    """``schema.table``, as it is written in SQL."""
    return f"{written(name[0])}.{written(name[1])}"


def patterns_of(text: str) -> list[str]:
    """Divide a list of patterns at its commas.

    Raises:
        ConfigurationError: one of them is invalid.
    """
    patterns, quoted = [""], False
    for character in text:
        quoted ^= character == '"'
        if character == "," and not quoted:
            patterns.append("")
        else:
            patterns[-1] += character
    patterns = [pattern.strip() for pattern in patterns]
    for pattern in patterns:
        compiled_pattern(pattern)
    return patterns


def compiled_pattern(pattern: str) -> list[re.Pattern[str]]:
    """A pattern, for the name, or for the schema and the name.

    Raises:
        ConfigurationError: it is invalid.
    """
    try:
        return [re.compile(part, re.DOTALL) for part in pattern_parts(pattern)]
    except re.error as error:
        raise ConfigurationError(
            f'invalid pattern of a name: "{pattern}": {error}', hint="write the name in double quotes, if it has such characters"
        ) from None


def pattern_parts(pattern: str) -> list[str]:
    """The regular expressions of a pattern: for the name, or for the schema and the name.

    Patterns are those of ``pg_dump --table``: ``*`` and ``?`` stand for characters, a dot separates the schema, and double quotes keep the
    case and all other characters. One rule differs: a pattern without a schema means the tables of all schemas, whatever the
    ``search_path``. Source: PostgreSQL manual, psql, Patterns; ``patternToSQLRegex`` of src/fe_utils/string_utils.c.

    Raises:
        ConfigurationError: it has no name, or more than one dot.
    """
    parts = list(_parts(pattern))
    if len(parts) > 2 or not parts[-1]:
        raise ConfigurationError(f'invalid pattern of a name: "{pattern}"', hint="give NAME or SCHEMA.NAME; *, ? and quotes as in pg_dump")
    return parts


def _parts(pattern: str) -> Iterable[str]:
    part, quoted, characters = "", False, iter(pattern.replace('""', "\0"))
    for character in characters:
        if character == '"':
            quoted = not quoted
        elif character == "\0":
            # two quotes: one within quotes, none outside
            part += '"' if quoted else ""
        elif character == "." and not quoted:
            yield part
            part = ""
        elif quoted:
            part += f"\\{character}" if character in _SPECIAL or character == "$" else character
        else:
            part += {"*": ".*", "?": ".", "$": "\\$"}.get(character, character.lower())
    if quoted:
        raise ConfigurationError(f'unterminated quote in the pattern of a name: "{pattern}"', hint="close the quote")
    yield part
