"""The parts of a filter: their types, their values in a row, and the functions that combine them.

Functions and operators are strict: NULL gives NULL. AND and OR follow three-valued logic. A part without columns is evaluated at once, as
the server's planner does (``eval_const_expressions``). If that fails, the filter is refused, unless the planner does not look at this part:
after a TRUE in OR, a FALSE in AND, and the constant that decides a CASE or a COALESCE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final

from subscriber.rowfilter import operators
from subscriber.rowfilter.filter_errors import RowFilterError, unsupported
from subscriber.rowfilter.sql_types import INTEGERS, TEXTS, read_literal
from subscriber.types.builtin import SQL_NAMES

__all__ = [
    "UNKNOWN",
    "Evaluate",
    "Typed",
    "alike",
    "arithmetic",
    "boolean",
    "cast",
    "collation_of",
    "connected_truth",
    "constant",
    "converted",
    "folded",
    "number",
    "once",
    "strict",
    "type_name",
    "typed_literal",
]

Evaluate = Callable[[Sequence[Any]], Any]

UNKNOWN: Final = "unknown"
"""The type of a quoted constant without type, and of NULL."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A part of the filter.

    Attributes:
        type: a name of :mod:`subscriber.rowfilter.sql_types`; ``unknown`` for a quoted constant without type, and for NULL.
        evaluate: its value in a row.
        constant: whether its value is the same in each row.
        collation: ``C`` if it was given; ``default`` for a constant; empty if it is not known.
        failure: the error of a part without columns, of this one or of one that it contains.
    """

    type: str
    evaluate: Evaluate
    constant: bool = False
    collation: str = "default"
    failure: RowFilterError | None = None

    @property
    def value(self) -> Any:
        """Of a constant."""
        return self.evaluate(())


def constant(type_: str, value: Any, collation: str = "default") -> Typed:
    """A part without columns."""
    return Typed(type_, lambda row: value, constant=True, collation=collation)


def boolean(part: Typed, where: str) -> Typed:
    """The part where a condition stands; ``where`` names the place for the error."""
    if part.type == UNKNOWN:
        return typed_literal(part, "bool")
    if part.type != "bool":
        raise RowFilterError(f"argument of {where} must be type boolean, not type {type_name(part.type)}", sqlstate="42804")
    return part


def type_name(type_: str) -> str:
    """PostgreSQL's name of a type, for messages."""
    return SQL_NAMES.get(type_, type_)


def typed_literal(part: Typed, type_: str) -> Typed:
    """Give a constant without type the type that its place needs. COLLATE before that has an effect only for texts."""
    if part.type != UNKNOWN:
        return part
    text = part.value
    return constant(type_, None if text is None else read_literal(text, type_), part.collation if type_ in TEXTS else "default")


def strict(type_: str, function: Callable[..., Any], parts: Sequence[Typed], collation: str = "default") -> Typed:
    """A function that gives NULL if an argument is NULL. If that argument has no columns, the others are not evaluated for a row."""
    if not _failure(parts) and any(part.constant and part.value is None for part in parts):
        return constant(type_, None, collation)
    evaluate = _on_one(function, parts[0].evaluate) if len(parts) == 1 else _on_several(function, [part.evaluate for part in parts])
    return folded(Typed(type_, evaluate, collation=collation), parts)


def _on_one(function: Callable[[Any], Any], argument: Evaluate) -> Evaluate:
    def evaluate(row: Sequence[Any]) -> Any:
        value = argument(row)
        return None if value is None else function(value)

    return evaluate


def _on_several(function: Callable[..., Any], arguments: Sequence[Evaluate]) -> Evaluate:
    if len(arguments) == 2:
        first, second = arguments

        def evaluate_two(row: Sequence[Any]) -> Any:
            left, right = first(row), second(row)
            return None if left is None or right is None else function(left, right)

        return evaluate_two

    def evaluate(row: Sequence[Any]) -> Any:
        values = [each(row) for each in arguments]
        return None if any(value is None for value in values) else function(*values)

    return evaluate


def folded(whole: Typed, parts: Sequence[Typed]) -> Typed:
    """What is made of these parts. If all are constants, it is evaluated at once."""
    failure = _failure(parts)
    if failure is None and all(part.constant for part in parts):
        try:
            return constant(whole.type, whole.value, whole.collation)
        except RowFilterError as error:
            failure = error
    return replace(whole, failure=failure)


def _failure(parts: Sequence[Typed]) -> RowFilterError | None:
    return next((part.failure for part in parts if part.failure is not None), None)


def collation_of(parts: Sequence[Typed]) -> str:
    """The collation of an operation: an explicit one wins."""
    texts = [part.collation for part in parts if part.type in {*TEXTS, UNKNOWN}]
    if "C" in texts:
        return "C"
    return "" if "" in texts else "default"


def number(text: str) -> Typed:
    """A number without quotes: the first of integer, bigint and numeric that holds it."""
    digits = text.removeprefix("-")
    if digits.isdigit() and len(significant := digits.lstrip("0")) < 20:
        whole = int(significant or "0") * (1 if digits == text else -1)
        for type_ in ("int4", "int8"):
            if -INTEGERS[type_] <= whole < INTEGERS[type_]:
                return constant(type_, whole)
    return constant("numeric", read_literal(text, "numeric"))


def arithmetic(sign: str, left: Typed, right: Typed) -> Typed:
    """``left sign right``. A quoted constant takes the type of the other operand."""
    if left.type in operators.NUMBERS and right.type == UNKNOWN:
        right = typed_literal(right, left.type)
    if right.type in operators.NUMBERS and left.type == UNKNOWN:
        left = typed_literal(left, right.type)
    if UNKNOWN in {left.type, right.type}:
        raise unsupported(f"operator {type_name(left.type)} {sign} {type_name(right.type)}", hint="cast the constants to their types")
    type_, function = operators.arithmetic(sign, left.type, right.type)
    return strict(type_, function, [left, right])


def converted(part: Typed, type_: str) -> Typed:
    """The part after the implicit conversion to a type that it is compared as."""
    conversion = operators.convert(part.type, type_)
    return replace(part, type=type_) if conversion is None else strict(type_, conversion, [part], part.collation)


def cast(part: Typed, target: str) -> Typed:
    """The part after an explicit cast."""
    if part.type == UNKNOWN:
        return typed_literal(part, target)
    function = operators.cast(part.type, target)
    if function is None:
        return replace(part, type=target)
    return strict(target, function, [part])


def alike(parts: Sequence[Typed], what: str) -> tuple[str, list[Typed]]:
    """Give all parts one type. Source: PostgreSQL manual, UNION, CASE, and Related Constructs."""
    types = [part.type for part in parts if part.type != UNKNOWN]
    if not types:
        return "text", [typed_literal(part, "text") for part in parts]
    type_ = types[0]
    for each in types[1:]:
        if each == type_:
            continue
        if each in operators.NUMBERS and type_ in operators.NUMBERS:
            type_ = max(type_, each, key=operators.NUMBERS.index)
        elif each in TEXTS and type_ in TEXTS:
            # each can be converted to the others: the first one stays
            continue
        elif {each, type_} == {"date", "timestamp"}:
            type_ = "timestamp"
        else:
            raise unsupported(f"{what} of types {type_name(type_)} and {type_name(each)}", hint="cast all of them to one type")
    return type_, [_aligned(typed_literal(part, type_), type_) for part in parts]


def _aligned(part: Typed, type_: str) -> Typed:
    if part.type == type_:
        return part
    return cast(part, type_) if type_ in {*TEXTS, "float4", "timestamp"} else converted(part, type_)


def once(part: Typed) -> Typed:
    """A part that is used in several places: it is evaluated once for each row, when the first of them needs it."""
    evaluate = part.evaluate
    if part.constant or isinstance(evaluate, itemgetter):
        return part
    latest: tuple[Sequence[Any] | None, Any] = (None, None)

    def kept(row: Sequence[Any]) -> Any:
        nonlocal latest
        if latest[0] is not row:
            latest = row, evaluate(row)
        return latest[1]

    return replace(part, evaluate=kept)


def connected_truth(parts: Sequence[Typed], *, until: bool) -> Typed:
    """OR (``until`` true) or AND of the parts: the first part of that value decides, and otherwise a NULL.

    A part without columns decides before the others are evaluated.
    """
    decided = next((place for place, part in enumerate(parts) if part.constant and part.value is until), None)
    if decided is not None and not _failure(parts[:decided]):
        return constant("bool", until)
    evaluates = [part.evaluate for part in parts]

    def evaluate(row: Sequence[Any]) -> Any:
        unknown = False
        for each in evaluates:
            value = each(row)
            if value is until:
                return until
            if value is None:
                unknown = True
        return None if unknown else not until

    return folded(Typed("bool", evaluate), parts)
