"""Give a parsed filter the types of a table's columns, and turn it into a function of a row.

Each node becomes a :class:`Typed`: its type, and a function from the values of a row to its value, where None is NULL. Functions and
operators are strict: NULL gives NULL. AND, OR, NOT and the tests IS … follow three-valued logic. Parts without columns are evaluated at
once, as the server's planner does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from sqlglot import exp

from subscriber.rowfilter import operators
from subscriber.rowfilter.filter_errors import NOT_SIMPLE, SYSTEM_COLUMN, USER_COLLATION, RowFilterError, not_allowed, unsupported
from subscriber.rowfilter.operators import no_operator
from subscriber.rowfilter.sql_types import INTEGERS, TEXTS, in_range, read_literal, type_of
from subscriber.rowfilter.syntax import ParsedExpression, arguments, connected
from subscriber.rowfilter.typed import (
    UNKNOWN,
    Evaluate,
    Typed,
    alike,
    any_or_all,
    arithmetic,
    boolean,
    cast,
    collation_of,
    connected_truth,
    constant,
    converted,
    folded,
    number,
    strict,
    type_name,
    typed_literal,
)
from subscriber.types import PgType
from subscriber.types.containers import ArrayReader

__all__ = ["Evaluation", "bind", "bind_expression"]

_SYSTEM_COLUMNS: Final = frozenset({"tableoid", "ctid", "xmin", "xmax", "cmin", "cmax"})
_SIGNS: Final[dict[type[exp.Expr], str]] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
}
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


def bind(parsed: ParsedExpression, columns: Mapping[str, PgType]) -> Evaluation:
    """Give the filter the types of the columns.

    Raises:
        RowFilterError: a column does not exist, types do not fit, or the filter cannot be evaluated exactly.
    """
    used, whole = bind_expression(parsed, columns)
    return Evaluation(used, boolean(whole, "PUBLICATION WHERE").evaluate)


def bind_expression(parsed: ParsedExpression, columns: Mapping[str, PgType]) -> tuple[Mapping[str, str], Typed]:
    """Return the columns that an expression of any type uses, and the expression.

    Raises:
        RowFilterError: as :func:`bind`.
    """
    binder = _Binder(parsed, columns)
    whole = binder.bind(parsed.tree)
    return binder.used, whole


class _Binder:
    def __init__(self, parsed: ParsedExpression, columns: Mapping[str, PgType]) -> None:
        self._casts = parsed.casts
        self._columns = columns
        self.used: dict[str, str] = {}

    def bind(self, node: exp.Expr) -> Typed:
        match node:
            case exp.Paren():
                return self.bind(node.this)
            case exp.And() | exp.Or():
                return self._connector(node)
            case exp.Not():
                return strict("bool", lambda value: not value, [boolean(self.bind(node.this), "NOT")])
            case exp.Literal():
                return self._literal(node)
            case exp.Null():
                return constant(UNKNOWN, None)
            case exp.Boolean():
                return constant("bool", bool(node.this))
            case exp.Column():
                return self._column(node)
            case exp.Is():
                return self._is(node)
            case exp.NullSafeEQ() | exp.NullSafeNEQ():
                return self._distinct(node)
            case exp.Neg():
                return self._negative(node)
            case exp.In():
                return self._in(node.this, node.expressions)
            case exp.Between():
                low = self._compare(">=", self.bind(node.this), self.bind(node.args["low"]))
                high = self._compare("<=", self.bind(node.this), self.bind(node.args["high"]))
                return connected_truth([low, high], until=False)
            case exp.Like():
                return self._like(node)
            case exp.Cast():
                return self._cast(node)
            case exp.Collate():
                return self._collate(node)
            case exp.Case():
                return self._case(node)
            case exp.Coalesce() | exp.Greatest() | exp.Least():
                return self._several(node)
            case exp.Nullif():
                return self._nullif(node)
            case exp.Array() | exp.Any():
                raise unsupported("an array or ANY in this place", hint="use an array only as in: column = ANY (ARRAY[…])")
        return self._operation(node)

    def _operation(self, node: exp.Expr) -> Typed:
        kind = type(node)
        if kind in {exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE}:
            sign, other = _SIGNS[kind], node.args["expression"]
            if isinstance(other, exp.Any):
                return self._array(node.this, sign, other.this, any_=True)
            if isinstance(other, exp.Anonymous) and str(other.this).lower() == "all":
                return self._array(node.this, sign, other.expressions[0], any_=False)
            return self._compare(sign, self.bind(node.this), self.bind(other))
        if kind is exp.DPipe:
            parts = [self.bind(each) for each in (node.this, node.args["expression"])]
            types = {part.type for part in parts}
            if not types <= {*TEXTS, UNKNOWN} or types == {UNKNOWN}:
                raise unsupported(f"operator {type_name(parts[0].type)} || {type_name(parts[1].type)}", hint="cast both sides to text")
            parts = [typed_literal(part, "text") for part in parts]
            return strict("text", lambda left, right: left + right, parts, collation_of(parts))
        if kind in _SIGNS:
            left, right = self.bind(node.this), self.bind(node.args["expression"])
            return arithmetic(_SIGNS[kind], left, right)
        return self._call(node)

    # --- leaves

    def _literal(self, node: exp.Literal) -> Typed:
        text = str(node.this)
        if node.is_string:
            return constant(UNKNOWN, text)
        return number(text)

    def _column(self, node: exp.Column) -> Typed:
        identifier = node.this
        name = str(identifier.this) if identifier.args.get("quoted") else str(identifier.this).lower()
        if name not in self._columns:
            if name in _SYSTEM_COLUMNS:
                raise not_allowed(SYSTEM_COLUMN)
            raise RowFilterError(f'column "{name}" does not exist', sqlstate="42703")
        if name not in self.used:
            self.used[name] = type_of(self._columns[name], name)
        place = list(self.used).index(name)
        return Typed(self.used[name], lambda row: row[place], collation="")

    def _negative(self, node: exp.Neg) -> Typed:
        if isinstance(node.this, exp.Literal) and not node.this.is_string:
            # the grammar makes one constant of them: -2147483648 is an integer
            return number(f"-{node.this.this}")
        part = self.bind(node.this)
        if part.type == UNKNOWN:
            raise unsupported("the sign of a quoted constant", hint="write the sign inside the quotes")
        if part.type not in operators.NUMBERS:
            raise unsupported(f"operator - {type_name(part.type)}")
        if part.type in INTEGERS:
            type_ = part.type
            return strict(type_, lambda value: in_range(-value, type_), [part])
        return strict(part.type, lambda value: value.copy_negate() if isinstance(value, Decimal) else -value, [part])

    # --- logic

    def _connector(self, node: exp.Connector) -> Typed:
        word = "AND" if isinstance(node, exp.And) else "OR"
        return connected_truth([boolean(self.bind(each), word) for each in connected(node)], until=word == "OR")

    def _is(self, node: exp.Is) -> Typed:
        negated = bool(node.args.get("negate"))
        wanted = node.args["expression"]
        part = self.bind(node.this)
        if isinstance(wanted, exp.Null):
            evaluate = part.evaluate
            return folded(Typed("bool", lambda row: (evaluate(row) is None) != negated, constant=part.constant))
        truth = bool(wanted.this)
        test = boolean(part, f"IS {'NOT ' if negated else ''}{str(truth).upper()}").evaluate
        return folded(Typed("bool", lambda row: (test(row) is truth) != negated, constant=part.constant))

    def _distinct(self, node: exp.Expr) -> Typed:
        negated = isinstance(node, exp.NullSafeEQ)
        left, right = self.bind(node.this), self.bind(node.args["expression"])
        equal = self._compare("=", left, right)
        first, second, same = left.evaluate, right.evaluate, equal.evaluate

        def evaluate(row: Sequence[Any]) -> bool:
            missing = (first(row) is None) + (second(row) is None)
            distinct = missing == 1 if missing else not same(row)
            return distinct != negated

        return folded(Typed("bool", evaluate, constant=left.constant and right.constant))

    def _case(self, node: exp.Case) -> Typed:
        # the server takes a constant without type for a text, whatever it is compared with
        subject = typed_literal(self.bind(node.this), "text") if node.args.get("this") is not None else None
        conditions: list[Typed] = []
        for each in node.args["ifs"]:
            test = self.bind(each.this)
            conditions.append(boolean(test, "CASE/WHEN") if subject is None else self._compare("=", subject, test))
        default = node.args.get("default")
        results = [self.bind(each.args["true"]) for each in node.args["ifs"]]
        results.append(self.bind(default) if default is not None else constant(UNKNOWN, None))
        # the server looks at the default first
        type_, (last, *others) = alike([results[-1], *results[:-1]], "CASE")
        results = [*others, last]
        pairs = [(test.evaluate, result.evaluate) for test, result in zip(conditions, results[:-1], strict=True)]
        otherwise = results[-1].evaluate

        def evaluate(row: Sequence[Any]) -> Any:
            for test, result in pairs:
                if test(row):
                    return result(row)
            return otherwise(row)

        fixed = all(part.constant for part in (*conditions, *results))
        return folded(Typed(type_, evaluate, constant=fixed, collation=collation_of(results)))

    def _several(self, node: exp.Expr) -> Typed:
        name = type(node).__name__.upper()
        type_, parts = alike([self.bind(each) for each in arguments(node)], name)
        evaluates = [part.evaluate for part in parts]
        collation = collation_of(parts)
        if isinstance(node, exp.Coalesce):

            def evaluate(row: Sequence[Any]) -> Any:
                for each in evaluates:
                    value = each(row)
                    if value is not None:
                        return value
                return None

        else:
            sign = ">" if isinstance(node, exp.Greatest) else "<"
            if type_ in TEXTS and collation != "C":
                raise operators.needs_collation(name)
            before = operators.comparison(sign, "float8" if type_ == "float4" else type_)

            def evaluate(row: Sequence[Any]) -> Any:
                found = None
                for each in evaluates:
                    value = each(row)
                    if value is not None and (found is None or before(value, found)):
                        found = value
                return found

        return folded(Typed(type_, evaluate, constant=all(part.constant for part in parts), collation=collation))

    def _nullif(self, node: exp.Expr) -> Typed:
        left, right = _known(*(self.bind(each) for each in arguments(node)))
        equal = self._compare("=", left, right)
        # the value is the left operand of the operator, after its conversion
        left = converted(left, operators.operand_type(left.type, operators.common_type("=", left.type, right.type)))
        first, same = left.evaluate, equal.evaluate

        def evaluate(row: Sequence[Any]) -> Any:
            return None if same(row) else first(row)

        return folded(Typed(left.type, evaluate, constant=left.constant and right.constant, collation=left.collation))

    # --- comparisons

    def _compare(self, sign: str, left: Typed, right: Typed) -> Typed:
        left, right = _known(left, right)
        type_ = operators.common_type(sign, left.type, right.type)
        if type_ in TEXTS and sign not in {"=", "<>"} and collation_of([left, right]) != "C":
            raise operators.needs_collation(f"operator {sign}")
        return strict("bool", operators.comparison(sign, type_), [converted(left, type_), converted(right, type_)])

    def _in(self, node: exp.Expr, items: Sequence[exp.Expr]) -> Typed:
        subject = self.bind(node)
        if subject.type == UNKNOWN:
            raise _quoted_subject()
        parts = [self.bind(each) for each in items]
        constants = [part for part in parts if part.constant]
        if len(constants) > 1 and subject.type == "varchar":
            # the server would have to convert an array
            raise not_allowed(NOT_SIMPLE)
        if len(constants) > 1:
            # the server makes an array of them, and first gives them and the subject one type
            _, (_, *found) = alike([subject, *constants], "IN")
            array = any_or_all(subject, found, [self._compare("=", subject, part) for part in found], any_=True)
            others = [part for part in parts if not part.constant]
            return connected_truth([array, *(self._compare("=", subject, part) for part in others)], until=True)
        return connected_truth([self._compare("=", subject, part) for part in parts], until=True)

    def _array(self, node: exp.Expr, sign: str, array: exp.Expr, *, any_: bool) -> Typed:
        while isinstance(array, exp.Paren):
            array = array.this
        target = None
        if isinstance(array, exp.Cast):
            target = self._casts[id(array)].removesuffix("[]")
            if not self._casts[id(array)].endswith("[]"):
                raise RowFilterError("op ANY/ALL (array) requires array on right side", sqlstate="42809")
            array = array.this
            while isinstance(array, exp.Paren):
                array = array.this
        subject = self.bind(node)
        if isinstance(array, exp.Array):
            if not array.expressions:
                raise unsupported("an empty array")
            parts = [self.bind(each) for each in array.expressions]
            # a cast of ARRAY[…] is a cast of each element
            element, parts = alike(parts, "ARRAY") if target is None else (target, [cast(part, target) for part in parts])
        elif isinstance(array, exp.Literal) and array.is_string:
            element = target or {"varchar": "text"}.get(subject.type, subject.type)
            parts = [constant(element, each) for each in self._elements(str(array.this), element)]
        else:
            raise unsupported("an array that is neither ARRAY[…] nor a constant")
        if subject.type == UNKNOWN:
            raise _quoted_subject()
        if operators.operand_type(element, operators.common_type(sign, subject.type, element)) != element:
            # the server would have to convert the array
            raise not_allowed(NOT_SIMPLE)
        return any_or_all(subject, parts, [self._compare(sign, subject, part) for part in parts], any_=any_)

    def _elements(self, text: str, type_: str) -> list[Any]:
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

    def _like(self, node: exp.Like) -> Typed:
        parts = [typed_literal(self.bind(each), "text") for each in (node.this, node.args["expression"])]
        types = {part.type for part in parts}
        if "bpchar" in types and types <= TEXTS:
            raise unsupported("LIKE of character", hint="cast it to text")
        if "bytea" in types:
            raise unsupported("LIKE of bytea")
        if not types <= TEXTS:
            raise no_operator("~~", parts[0].type, parts[1].type)
        negated = bool(node.args.get("negate"))
        return strict("bool", lambda text, pattern: operators.like(text, pattern) != negated, parts)

    # --- casts and functions

    def _cast(self, node: exp.Cast) -> Typed:
        target = self._casts[id(node)]
        if target.endswith("[]"):
            raise unsupported("an array outside of ANY or ALL")
        return cast(self.bind(node.this), target)

    def _collate(self, node: exp.Collate) -> Typed:
        given = node.args["expression"]
        name = str(given.this if isinstance(given, exp.Expr) else given)
        part = self.bind(node.this)
        # a constant without type stays one: its place gives it the type (coerce_type, CollateExpr)
        if part.type not in {*TEXTS, UNKNOWN}:
            raise RowFilterError(f"collations are not supported by type {type_name(part.type)}", sqlstate="42804")
        if name != "C":
            raise unsupported(f'collation "{name}"', hint=f'use COLLATE "C"; {USER_COLLATION}')
        return Typed(part.type, part.evaluate, constant=part.constant, collation="C")

    def _call(self, node: exp.Expr) -> Typed:
        name = "starts_with" if isinstance(node, exp.StartsWith) else type(node).__name__.lower()
        if isinstance(node, exp.Anonymous):
            name = str(node.this).lower()
        parts = [self.bind(each) for each in arguments(node)]
        if name in {"abs", "mod", "octet_length"}:
            if any(part.type == UNKNOWN for part in parts):
                raise unsupported(f"a quoted constant as an argument of {name}", hint="cast the constant to its type")
        else:
            parts = [typed_literal(part, "text" if place == 0 or name == "starts_with" else "int4") for place, part in enumerate(parts)]
        collation = collation_of(parts)
        type_, function = operators.call(name, [part.type for part in parts], c_collation=collation == "C")
        return strict(type_, function, parts, collation)


def _known(left: Typed, right: Typed) -> tuple[Typed, Typed]:
    """The operands of a comparison: a constant without type takes the type of the other one, and two of them are texts."""
    if left.type == right.type == UNKNOWN:
        return typed_literal(left, "text"), typed_literal(right, "text")
    return typed_literal(left, right.type), typed_literal(right, left.type)


def _quoted_subject() -> RowFilterError:
    return unsupported("a quoted constant before IN or ANY", hint="cast the constant to its type")
