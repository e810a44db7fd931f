"""One option, declared by a dataclass field, and the parser and reference table derived from the declarations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple, TypeVar

from subscriber.config.reading import OptionType, parse_assignments
from subscriber.config.suggestion import suggestion
from subscriber.errors import ConfigurationError

__all__ = ["Alterable", "Option", "ReferenceRow", "declared", "option", "parse_options", "reference"]

Alterable = Literal["never", "always", "disabled"]
"""When ``ALTER SUBSCRIPTION … SET`` may change a parameter. ``disabled``: while the subscription is disabled and has a slot name."""

_Value = TypeVar("_Value")
_KEY: Final = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The properties of one option.

    Attributes:
        name: its name.
        default: its value if it is not given.
        type: how its values are written.
        help: one line, for ``--help`` and the reference documentation.
        default_text: shown instead of ``default``.
        least: the smallest allowed number.
        most: the largest allowed number; None: the largest of the type.
        flag: the command line has a flag of this name that sets it to true.
        ours: PostgreSQL has no option of this name and meaning.
        since: the first major version of a publisher that supports it; 0: all.
        alter: when it may be altered.
        alter_since: the first major version of a publisher whose slot can be altered accordingly; 0: the slot does not depend on it.
        column: its column of ``pg_subscription`` in the target's catalog; empty: it is not stored there, or is part of the state.
        codes: values of the column by values of the option, where they differ.
        length: the largest number of characters of a text in the column.
        keyed: it is given as ``name.KEY=value``, once for each key. The dataclass takes a mapping.
        live: a subscription that runs follows a change, without a new start.
    """

    name: str = ""
    default: Any
    type: OptionType
    help: str
    default_text: str | None = None
    least: float | None = None
    most: float | None = None
    flag: bool = False
    ours: bool = False
    since: int = 0
    alter: Alterable = "never"
    alter_since: int = 0
    column: str = ""
    codes: Mapping[str, str] | None = None
    length: int = 20
    keyed: bool = False
    live: bool = False

    @property
    def shown_default(self) -> str:
        """The default as a user writes it."""
        return self.default_text or self.type.show(self.default)

    def check_range(self, value: Any) -> None:
        """Reject a number that is too small or too large.

        Raises:
            ConfigurationError: with PostgreSQL's message.
        """
        least, most = self.least, self.type.most if self.most is None else self.most
        if least is not None and most is not None and not least <= value <= most:
            show = self.type.show
            raise ConfigurationError(
                f'{show(value)} is outside the valid range for parameter "{self.name}"', hint=f"a value from {show(least)} to {show(most)}"
            )

    @property
    def stored_words(self) -> tuple[str, ...]:
        """All values of the column, the default first, if the option has a fixed list of values; else empty."""
        words = sorted(self.type.words, key=lambda word: word != self.default)
        return tuple(self.stored(word) for word in words)

    def stored(self, value: Any) -> Any:
        """The value of the column for a value of the option."""
        return self.codes[value] if self.codes else value

    def loaded(self, stored: Any) -> Any:
        """The value of the option for a value of the column."""
        return next(value for value, code in self.codes.items() if code == stored) if self.codes else stored


def option(default: _Value, type: OptionType, help: str, **known: Any) -> _Value:
    """Declare an option as a field of a dataclass; the arguments are attributes of :class:`Option`."""
    return field(default=default, metadata={_KEY: Option(default=default, type=type, help=help, **known)})


def declared(options: type) -> Mapping[str, Option]:
    """The options that a dataclass declares, by name."""
    return {each.name: replace(each.metadata[_KEY], name=each.name) for each in fields(options)}


def parse_options(items: Iterable[str], known: Mapping[str, Option], what: str) -> dict[str, Any]:
    """Read ``name=value`` texts.

    Args:
        items: the texts.
        known: the options that are allowed.
        what: the beginning of the message about any other option.

    Raises:
        ConfigurationError: an unknown name or value.
    """
    values: dict[str, Any] = {}
    for name, text in parse_assignments(items).items():
        family, dot, key = name.partition(".")
        if dot and family in known and known[family].keyed and not isinstance(values.get(family), str):
            values.setdefault(family, {})[key] = text
            continue
        if name in values:
            raise ConfigurationError(f'conflicting or redundant options: "{name}" is given twice', hint="specify it once")
        if name not in known:
            raise ConfigurationError(f'{what} "{name}"', hint=_elsewhere(name, known) or suggestion(name, known))
        values[name] = known[name].type.parse(name, text)
    return values


def _elsewhere(name: str, known: Mapping[str, Option]) -> str | None:
    """The hint for an option that is given where settings are, or the other way round."""
    from subscriber.config import PARAMETERS, SETTINGS  # noqa: PLC0415 -- they are declared with this module

    if name in PARAMETERS and known.keys() <= SETTINGS.keys():
        return f"it is an option: -o {name}=…, or options.{name} of a subscription in a configuration file"
    if name in SETTINGS and known.keys() <= PARAMETERS.keys():
        return f"it is a setting: -c {name}=…, or settings.{name} in a configuration file"
    return None


class ReferenceRow(NamedTuple):
    """One option as the reference documentation shows it. An empty text: nothing to show."""

    name: str
    type: str
    default: str
    unit: str
    publisher: str
    alterable: str
    help: str


_ALTERABLE_TEXTS: Final[Mapping[Alterable, str]] = {"never": "no", "always": "yes", "disabled": "while disabled"}


def reference(options: type) -> list[ReferenceRow]:
    """The rows of the reference table for a dataclass of options, in the order of their declaration."""
    return [
        ReferenceRow(
            name=each.name,
            type=", ".join(each.type.words) or each.type.name,
            default=each.shown_default,
            unit=each.type.unit or "",
            publisher=f"{each.since} or later" if each.since else "",
            alterable=_ALTERABLE_TEXTS[each.alter],
            help=each.help,
        )
        for each in declared(options).values()
    ]
