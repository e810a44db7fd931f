"""Give a parsed filter the types of a table's columns, and turn it into a function of a row.

Each node becomes a :class:`Typed`: its type, and a function from the values of a row to its value, where None is NULL. Functions and
operators are strict: NULL gives NULL. AND, OR, NOT and the tests IS … follow three-valued logic. Parts without columns are evaluated at
once, as the server's planner does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain
from operator import itemgetter
from typing import Any, Final

from subscriber.rowfilter import operators
from subscriber.rowfilter.filter_errors import NOT_SIMPLE, SYSTEM_COLUMN, USER_COLLATION, RowFilterError, not_allowed, unsupported
from subscriber.rowfilter.operators import no_operator
from subscriber.rowfilter.sql_types import INTEGERS, TEXTS, in_range, read_literal, type_of
from subscriber.rowfilter.syntax import Node
from subscriber.rowfilter.typed import (
    UNKNOWN,
    Evaluate,
    Typed,
    alike,
    arithmetic,
    boolean,
    cast,
    collation_of,
    connected_truth,
    constant,
    converted,
    folded,
    number,
    once,
    strict,
    type_name,
    typed_literal,
)
from subscriber.types import PgType
from subscriber.types.containers import ArrayReader

__all__ = ["Evaluation", "bind", "bind_expression"]

_SYSTEM_COLUMNS: Final = frozenset({"tableoid", "ctid", "xmin", "xmax", "cmin", "cmax"})
_ARRAY: Final = ArrayReader(",")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A filter for the rows of one table.

    Attributes:
        columns: the columns that it uses, in the order of the values that ``evaluate`` takes, each with its type.
        evaluate: True, False or None (NULL) for a row. Raises RowFilterError for values such as a division by zero.
    """

    columns: Mapping[str, str]
    evaluate: Evaluate


def bind(node: Node, columns: Mapping[str, PgType]) -> Evaluation:
    """Give the filter the types of the columns.

    Raises:
        RowFilterError: a column does not exist, types do not fit, or the filter cannot be evaluated exactly.
    """
    used, whole = bind_expression(node, columns)
    return Evaluation(used, boolean(whole, "PUBLICATION WHERE").evaluate)


def bind_expression(node: Node, columns: Mapping[str, PgType]) -> tuple[Mapping[str, str], Typed]:
    """Return the columns that an expression of any type uses, and the expression.

    Raises:
        RowFilterError: as :func:`bind`.
    """
    binder = _Binder(columns)
    whole = binder.bind(node)
    if whole.failure is not None:
        raise whole.failure
    return binder.used, whole


class _Binder:
    def __init__(self, columns: Mapping[str, PgType]) -> None:
        self._columns = columns
        self.used: dict[str, str] = {}

    def bind(self, node: Node) -> Typed:
        match node.kind:
            case "string":
                return constant(UNKNOWN, node.text)
            case "number":
                return number(node.text)
            case "null":
                return constant(UNKNOWN, None)
            case "true" | "false":
                return constant("bool", node.kind == "true")
            case "column":
                return self._column(node.text)
            case "any" | "all":
                return self._array(node)
            case "case" | "case of":
                return self._case(node)
            case "array":
                raise unsupported("an array in this place", hint="use an array only as in: column = ANY (ARRAY[…])")
            case "cast" if node.text.endswith("[]"):
                raise unsupported("an array outside of ANY or ALL")
        parts = [self.bind(each) for each in node.parts]
        match node.kind:
            case "and" | "or":
                return connected_truth([boolean(part, node.kind.upper()) for part in parts], until=node.kind == "or")
            case "not":
                return strict("bool", lambda value: not value, [boolean(parts[0], "NOT")])
            case "negative":
                return _negative(parts[0])
            case "is":
                return _is(parts[0], node.text)
            case "distinct":
                return _distinct(*parts, negated=node.text == "not")
            case "compare":
                return _compare(node.text, *parts)
            case "operator":
                return _joined(parts) if node.text == "||" else arithmetic(node.text, *parts)
            case "in":
                return _in(once(parts[0]), parts[1:], [_has_column(item) for item in node.parts[1:]])
            case "between":
                value, low, high = map(once, parts)
                within = _between(value, low, high)
                return connected_truth([within, _between(value, high, low)], until=True) if node.text else within
            case "like":
                return _like(parts)
            case "cast":
                return cast(parts[0], node.text)
            case "collate":
                return _collate(parts[0], node.text)
        return _call(node.text, parts)

    def _column(self, name: str) -> Typed:
        if name not in self._columns:
            if name in _SYSTEM_COLUMNS:
                raise not_allowed(SYSTEM_COLUMN)
            raise RowFilterError(f'column "{name}" does not exist', sqlstate="42703")
        if name not in self.used:
            self.used[name] = type_of(self._columns[name], name)
        return Typed(self.used[name], itemgetter(list(self.used).index(name)), collation="")

    def _case(self, node: Node) -> Typed:
        parts = [self.bind(each) for each in node.parts]
        # the server takes a constant without type for a text, whatever it is compared with
        subject = once(typed_literal(parts.pop(0), "text")) if node.kind == "case of" else None
        *pairs, default = parts
        conditions = [boolean(test, "CASE/WHEN") if subject is None else _compare("=", subject, test) for test in pairs[::2]]
        # the server looks at the default first
        type_, (default, *results) = alike([default, *pairs[1::2]], "CASE")
        collation = collation_of([*results, default])
        reached: list[tuple[Typed, Typed]] = []
        for test, result in zip(conditions, results, strict=True):
            if not test.constant:
                reached.append((test, result))
            elif test.value:
                default = result
                break
        if not reached:
            return replace(default, collation=collation)
        branches = [(test.evaluate, result.evaluate) for test, result in reached]
        otherwise = default.evaluate

        def evaluate(row: Sequence[Any]) -> Any:
            for test, result in branches:
                if test(row):
                    return result(row)
            return otherwise(row)

        return folded(Typed(type_, evaluate, collation=collation), [*chain.from_iterable(reached), default])

    def _array(self, node: Node) -> Typed:
        of, array = node.parts
        target = None
        if array.kind == "cast":
            target = array.text.removesuffix("[]")
            if target == array.text:
                raise RowFilterError("op ANY/ALL (array) requires array on right side", sqlstate="42809")
            (array,) = array.parts
        subject = self.bind(of)
        if array.kind == "array":
            parts = [self.bind(each) for each in array.parts]
            # a cast of ARRAY[…] is a cast of each element
            element, parts = alike(parts, "ARRAY") if target is None else (target, [cast(part, target) for part in parts])
        elif array.kind == "string":
            element = target or {"varchar": "text"}.get(subject.type, subject.type)
            parts = [constant(element, each) for each in _elements(array.text, element)]
        else:
            raise unsupported("an array that is neither ARRAY[…] nor a constant")
        if subject.type == UNKNOWN:
            raise _quoted_subject()
        return _any_or_all(node.text, subject, parts, element, any_=node.kind == "any")


# --- logic


def _is(part: Typed, wanted: str) -> Typed:
    negated = wanted.startswith("not ")
    if wanted.endswith("null"):
        evaluate = part.evaluate
        return folded(Typed("bool", lambda row: (evaluate(row) is None) != negated), [part])
    truth = {"true": True, "false": False, "unknown": None}[wanted.removeprefix("not ")]
    part = boolean(part, f"IS {wanted.upper()}")
    test = part.evaluate
    return folded(Typed("bool", lambda row: (test(row) is truth) != negated), [part])


def _distinct(left: Typed, right: Typed, *, negated: bool) -> Typed:
    equal, left, right = _compared("=", left, right)
    first, second = left.evaluate, right.evaluate

    def evaluate(row: Sequence[Any]) -> bool:
        one, other = first(row), second(row)
        distinct = one is not other if one is None or other is None else not equal(one, other)
        return distinct != negated

    return folded(Typed("bool", evaluate), [left, right])


def _several(function: str, parts: Sequence[Typed]) -> Typed:
    """COALESCE, GREATEST or LEAST."""
    type_, parts = alike(parts, function.upper())
    collation = collation_of(parts)
    if function == "coalesce":
        parts = [part for part in parts if not (part.constant and part.value is None)]
        # the first constant is the last that is looked at
        parts = parts[: next((place for place, part in enumerate(parts, 1) if part.constant), None)]
    evaluates = [part.evaluate for part in parts]
    if function == "coalesce":

        def evaluate(row: Sequence[Any]) -> Any:
            for each in evaluates:
                value = each(row)
                if value is not None:
                    return value
            return None

    else:
        if type_ in TEXTS and collation != "C":
            raise operators.needs_collation(function.upper())
        before = operators.comparison(">" if function == "greatest" else "<", "float8" if type_ == "float4" else type_)

        def evaluate(row: Sequence[Any]) -> Any:
            found = None
            for each in evaluates:
                value = each(row)
                if value is not None and (found is None or before(value, found)):
                    found = value
            return found

    return folded(Typed(type_, evaluate, collation=collation), parts)


def _nullif(left: Typed, right: Typed) -> Typed:
    left, right = _known(left, right)
    left = once(left)
    equal = _compare("=", left, right)
    # the value is the left operand of the operator, after its conversion
    left = converted(left, operators.operand_type(left.type, operators.common_type("=", left.type, right.type)))
    if right.failure is None and any(part.constant and part.value is None for part in (left, right)):
        return left
    first, same = left.evaluate, equal.evaluate

    def evaluate(row: Sequence[Any]) -> Any:
        return None if same(row) else first(row)

    return folded(Typed(left.type, evaluate, collation=left.collation), [left, right])


# --- comparisons


def _compare(sign: str, left: Typed, right: Typed) -> Typed:
    compare, *operands = _compared(sign, left, right)
    return strict("bool", compare, operands)


def _compared(sign: str, left: Typed, right: Typed) -> tuple[operators.Function, Typed, Typed]:
    """The comparison, and its operands as the type that it compares."""
    left, right = _known(left, right)
    type_ = operators.common_type(sign, left.type, right.type)
    return _comparison(sign, type_, [left, right]), converted(left, type_), converted(right, type_)


def _comparison(sign: str, type_: str, parts: Sequence[Typed]) -> operators.Function:
    if type_ in TEXTS and sign not in {"=", "<>"} and collation_of(parts) != "C":
        raise operators.needs_collation(f"operator {sign}")
    return operators.comparison(sign, type_)


def _between(value: Typed, low: Typed, high: Typed) -> Typed:
    return connected_truth([_compare(">=", value, low), _compare("<=", value, high)], until=False)


def _any_or_all(sign: str, subject: Typed, elements: Sequence[Typed], type_: str, *, any_: bool) -> Typed:
    """A comparison with an array of this type. The subject and all elements are evaluated before the first comparison."""
    common = operators.common_type(sign, subject.type, type_)
    if operators.operand_type(type_, common) != type_:
        # the server would have to convert the array
        raise not_allowed(NOT_SIMPLE)
    compare = _comparison(sign, common, [subject, *elements])
    subject, *parts = (converted(part, common) for part in (subject, *elements))
    of, evaluates = subject.evaluate, [part.evaluate for part in parts]
    fixed = [part.value for part in parts] if all(part.constant for part in parts) else None

    def evaluate(row: Sequence[Any]) -> Any:
        value, values = of(row), [each(row) for each in evaluates] if fixed is None else fixed
        unknown = False
        for each in values:
            if value is None or each is None:
                unknown = True
            elif compare(value, each) is any_:
                return any_
        return None if unknown else not any_

    return folded(Typed("bool", evaluate), [subject, *parts])


def _has_column(node: Node) -> bool:
    return node.kind == "column" or any(map(_has_column, node.parts))


def _in(subject: Typed, parts: Sequence[Typed], variable: Sequence[bool]) -> Typed:
    """``variable``: which parts contain a column. The server looks at that before it simplifies expressions."""
    if subject.type == UNKNOWN:
        raise _quoted_subject()
    constants = [part for part, varies in zip(parts, variable, strict=True) if not varies]
    if len(constants) > 1 and subject.type == "varchar":
        # the server would have to convert an array
        raise not_allowed(NOT_SIMPLE)
    if len(constants) > 1:
        # the server makes an array of them, and first gives them and the subject one type
        type_, (_, *found) = alike([subject, *constants], "IN")
        array = _any_or_all("=", subject, found, type_, any_=True)
        others = [part for part, varies in zip(parts, variable, strict=True) if varies]
        return connected_truth([array, *(_compare("=", subject, part) for part in others)], until=True)
    return connected_truth([_compare("=", subject, part) for part in parts], until=True)


def _elements(text: str, type_: str) -> list[Any]:
    """The values of a constant array."""
    if type_ == UNKNOWN:
        raise _quoted_subject()
    if type_ not in {*INTEGERS, "text", "numeric", "uuid", "date"} or "\\" in text:
        raise unsupported(f"a constant array of type {type_name(type_)}", hint="use ARRAY[…]")
    try:
        found = _ARRAY.read(text, lambda each: read_literal(each, type_))
    except ValueError:
        raise unsupported("a constant array that is not written as PostgreSQL prints it", hint="use ARRAY[…]") from None
    if any(isinstance(each, list) for each in found):
        raise unsupported("an array of several dimensions")
    return found


def _like(parts: Sequence[Typed]) -> Typed:
    parts = [typed_literal(each, "text") for each in parts]
    types = {part.type for part in parts}
    if "bpchar" in types and types <= TEXTS:
        raise unsupported("LIKE of character", hint="cast it to text")
    if "bytea" in types:
        raise unsupported("LIKE of bytea")
    if not types <= TEXTS:
        raise no_operator("~~", parts[0].type, parts[1].type)
    return strict("bool", operators.like, parts)


# --- operators and functions


def _negative(part: Typed) -> Typed:
    if part.type == UNKNOWN:
        raise unsupported("the sign of a quoted constant", hint="write the sign inside the quotes")
    if part.type not in operators.NUMBERS:
        raise unsupported(f"operator - {type_name(part.type)}")
    if part.type in INTEGERS:
        type_ = part.type
        return strict(type_, lambda value: in_range(-value, type_), [part])
    return strict(part.type, lambda value: value.copy_negate() if isinstance(value, Decimal) else -value, [part])


def _joined(parts: Sequence[Typed]) -> Typed:
    types = {part.type for part in parts}
    if not types <= {*TEXTS, UNKNOWN} or types == {UNKNOWN}:
        raise unsupported(f"operator {type_name(parts[0].type)} || {type_name(parts[1].type)}", hint="cast both sides to text")
    parts = [typed_literal(part, "text") for part in parts]
    return strict("text", lambda left, right: left + right, parts, collation_of(parts))


def _collate(part: Typed, name: str) -> Typed:
    # a constant without type stays one: its place gives it the type (coerce_type, CollateExpr)
    if part.type not in {*TEXTS, UNKNOWN}:
        raise RowFilterError(f"collations are not supported by type {type_name(part.type)}", sqlstate="42804")
    if name != "C":
        raise unsupported(f'collation "{name}"', hint=f'use COLLATE "C"; {USER_COLLATION}')
    return replace(part, collation="C")


def _call(function: str, parts: Sequence[Typed]) -> Typed:
    match function:
        case "coalesce" | "greatest" | "least":
            return _several(function, parts)
        case "nullif":
            return _nullif(*parts)
        case "abs" | "octet_length" if parts[0].type == UNKNOWN:
            raise unsupported(f"a quoted constant as an argument of {function}", hint="cast the constant to its type")
        case "abs" | "octet_length":
            pass
        case _:
            # all arguments of starts_with are texts, and the others have numbers after the first one
            others = "text" if function == "starts_with" else "int4"
            parts = [typed_literal(part, others if place else "text") for place, part in enumerate(parts)]
    collation = collation_of(parts)
    type_, evaluate = operators.call(function, [part.type for part in parts], c_collation=collation == "C")
    return strict(type_, evaluate, parts, collation)


def _known(left: Typed, right: Typed) -> tuple[Typed, Typed]:
    """The operands of a comparison: a constant without type takes the type of the other one, and two of them are texts."""
    if left.type == right.type == UNKNOWN:
        return typed_literal(left, "text"), typed_literal(right, "text")
    return typed_literal(left, right.type), typed_literal(right, left.type)


def _quoted_subject() -> RowFilterError:
    return unsupported("a quoted constant before IN or ANY", hint="cast the constant to its type")
