"""Parse a row filter with sqlglot, and make sure that PostgreSQL reads it the same way.

sqlglot accepts more than PostgreSQL, has other precedences for some operators, and writes several texts as one node (``len(a)`` as
``length(a)``, ``==`` as ``=``). Therefore a parsed filter is accepted only if it *conforms* to the text: each node has a fixed list of
texts (:func:`_forms`), and the nodes together must give the tokens of the text, no more and no less. An operand that the text does not
put into parentheses must bind more tightly than its operator in PostgreSQL's grammar (``gram.y``). A node without forms is refused. So
the tree is the one that PostgreSQL would build, whatever sqlglot does.

Source: PostgreSQL manual, Operator Precedence; ``gram.y``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import SqlglotError

from subscriber.rowfilter.filter_errors import MUTABLE_FUNCTION, NOT_SIMPLE, RowFilterError, not_allowed, syntax_error, unsupported
from subscriber.rowfilter.lexer import RESERVED, Token, tokens_of
from subscriber.rowfilter.sql_types import TYPE_WORDS

__all__ = ["ParsedExpression", "arguments", "connected", "parse_expression"]

_DEPTH: Final = 120
_FORMS: Final = "put each operand of an operator into parentheses, and use the forms that the documentation of row filters lists"
# levels of gram.y, from the loosest
_OR, _AND, _NOT, _IS, _COMPARISON, _IN, _OPERATOR, _PLUS, _TIMES, _COLLATE, _MINUS, _CAST, _ATOM = range(1, 14)
_ANY: Final = 0

_COMPARISONS: Final[dict[type[exp.Expr], tuple[str, ...]]] = {
    exp.EQ: ("=",),
    exp.NEQ: ("<>", "!="),
    exp.LT: ("<",),
    exp.LTE: ("<=",),
    exp.GT: (">",),
    exp.GTE: (">=",),
}
_ARITHMETIC: Final[dict[type[exp.Expr], tuple[str, int]]] = {
    exp.DPipe: ("||", _OPERATOR),
    exp.Add: ("+", _PLUS),
    exp.Sub: ("-", _PLUS),
    exp.Mul: ("*", _TIMES),
    exp.Div: ("/", _TIMES),
    exp.Mod: ("%", _TIMES),
}
_FUNCTIONS: Final[dict[type[exp.Expr], tuple[tuple[str, ...], tuple[str, ...]]]] = {
    # node: PostgreSQL's names for it, and the arguments in order
    exp.Abs: (("abs",), ("this",)),
    exp.Coalesce: (("coalesce",), ("this", "expressions")),
    exp.Greatest: (("greatest",), ("this", "expressions")),
    exp.Least: (("least",), ("this", "expressions")),
    exp.Left: (("left",), ("this", "expression")),
    exp.Length: (("length", "char_length", "character_length"), ("this",)),
    exp.Lower: (("lower",), ("this",)),
    exp.Mod: (("mod",), ("this", "expression")),
    exp.Nullif: (("nullif",), ("this", "expression")),
    exp.Right: (("right",), ("this", "expression")),
    exp.StartsWith: (("starts_with",), ("this", "expression")),
    exp.Substring: (("substr", "substring"), ("this", "start", "length")),
    exp.Upper: (("upper",), ("this",)),
}
_MUTABLE_NAMES: Final = """
    now random clock_timestamp statement_timestamp transaction_timestamp timeofday current_date current_time current_timestamp localtime
    localtimestamp current_user session_user system_user current_role user current_catalog current_schema nextval currval lastval setval
    gen_random_uuid uuidv7 to_char to_date version pg_sleep current_setting set_config concat concat_ws format
    current_database inet_client_addr txid_current pg_backend_pid
"""
_MUTABLE: Final = frozenset(_MUTABLE_NAMES.split())
"""Built-in functions of which no form is immutable."""


@dataclass(frozen=True, slots=True)
class ParsedExpression:
    """A filter whose syntax is allowed.

    Attributes:
        text: as given.
        tree: of sqlglot.
        casts: the target type of each cast, by the node's id.
    """

    text: str
    tree: exp.Expr
    casts: dict[int, str]


def parse_expression(text: str) -> ParsedExpression:
    """Parse a filter.

    Raises:
        RowFilterError: it is not an expression, or uses what row filters may not use.
    """
    tokens = tokens_of(text)
    _check_words(tokens)
    dialect = Postgres()
    try:
        trees = dialect.parser().parse(dialect.tokenize(text), text)
    except (SqlglotError, RecursionError):
        raise unsupported("it could not be parsed", hint=_FORMS) from None
    if len(trees) != 1 or trees[0] is None:
        raise syntax_error("")
    tree = trees[0]
    _check_nodes(tree)
    matcher = _Conformity(tokens)
    if len(tokens) not in matcher.ends(tree, 0, _ANY):
        raise unsupported("PostgreSQL may read it differently", hint=_FORMS)
    return ParsedExpression(text, tree, matcher.casts)


def connected(node: exp.Connector) -> list[exp.Expr]:
    """Return the operands of ``a AND b AND …`` or ``a OR b OR …``, in order."""
    kind = type(node)
    found: list[exp.Expr] = []
    current: exp.Expr = node
    while type(current) is kind:
        found.append(current.args["expression"])
        current = current.args["this"]
    return [current, *reversed(found)]


def arguments(node: exp.Expr) -> list[exp.Expr]:
    """Return the arguments of a function in order."""
    if isinstance(node, exp.Anonymous):
        return list(node.expressions)
    found: list[exp.Expr] = []
    for key in _FUNCTIONS[type(node)][1]:
        value = node.args.get(key)
        if isinstance(value, list):
            found += value
        elif value is not None:
            found.append(value)
    return found


def _check_words(tokens: Sequence[Token]) -> None:
    """Refuse what PostgreSQL refuses by name, before sqlglot gives it another form."""
    for place, token in enumerate(tokens):
        following = tokens[place + 1].text if place + 1 < len(tokens) and tokens[place + 1].kind == "mark" else ""
        if token.kind == "word" and token.text in _MUTABLE and (following == "(" or token.text in RESERVED):
            raise not_allowed(NOT_SIMPLE if token.text in RESERVED else MUTABLE_FUNCTION)
        if token.kind == "word" and (token.text in {"select", "table"} or (token.text in {"exists", "values"} and following == "(")):
            raise not_allowed(NOT_SIMPLE)


def _check_nodes(tree: exp.Expr) -> None:
    """Refuse nodes that are not on the list, and a tree that is too deep."""
    waiting: list[tuple[exp.Expr, int]] = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        if depth > _DEPTH:
            raise unsupported("it is nested too deeply")
        if isinstance(node, exp.And | exp.Or):
            waiting += [(each, depth + 1) for each in connected(node)]
            continue
        if isinstance(node, exp.DataType | exp.Identifier):
            continue
        if isinstance(node, exp.Anonymous) and str(node.this).lower() not in {"all", "octet_length"}:
            raise _unknown_function(str(node.this))
        if isinstance(node, exp.AggFunc):
            raise RowFilterError("aggregate functions are not allowed in WHERE", sqlstate="42803")
        if not isinstance(node, _ALLOWED):
            raise (
                _unknown_function(node.sql_name().lower()) if isinstance(node, exp.Func) else unsupported(f"syntax of the kind {node.key}")
            )
        for value in node.args.values():
            waiting += [(each, depth + 1) for each in (value if isinstance(value, list) else [value]) if isinstance(each, exp.Expr)]


def _unknown_function(name: str) -> RowFilterError:
    names = sorted({name for names, _ in _FUNCTIONS.values() for name in names} | {"octet_length"})
    return unsupported(f"function {name}", hint=f"functions that can be evaluated: {', '.join(names)}")


_ALLOWED: Final[tuple[type[exp.Expr], ...]] = (
    exp.And,
    exp.Or,
    exp.Not,
    exp.Paren,
    exp.Is,
    exp.Null,
    exp.Boolean,
    exp.Literal,
    exp.Column,
    exp.Cast,
    exp.Neg,
    exp.Between,
    exp.In,
    exp.Like,
    exp.NullSafeEQ,
    exp.NullSafeNEQ,
    exp.Any,
    exp.Array,
    exp.Case,
    exp.If,
    exp.Collate,
    exp.Anonymous,
    *_COMPARISONS,
    *_ARITHMETIC,
    *_FUNCTIONS,
)


@dataclass(frozen=True, slots=True)
class _Operand:
    """A child. ``least`` is the loosest level that it may have without parentheses."""

    node: exp.Expr
    least: int = _ANY


@dataclass(frozen=True, slots=True)
class _TypeName:
    """The type of the cast."""

    cast: exp.Expr


_Part = str | Token | _Operand | _TypeName
_Form = tuple[int, Sequence[_Part]]


class _Conformity:
    """Compares a tree with the tokens of the text."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._known: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.casts: dict[int, str] = {}

    def ends(self, node: exp.Expr, start: int, least: int) -> list[int]:
        """Return the places after the node's tokens, if they begin at ``start`` and its level is at least ``least``."""
        key = id(node), start
        if key not in self._known:
            self._known[key] = [(level, end) for level, parts in _forms(node) for end in self._parts(parts, start)]
        return list({end: None for level, end in self._known[key] if level >= least})

    def _parts(self, parts: Sequence[_Part], start: int) -> list[int]:
        places = [start]
        for part in parts:
            places = [end for place in places for end in self._part(part, place)]
            if not places:
                break
        return places

    def _part(self, part: _Part, place: int) -> list[int]:
        if isinstance(part, _Operand):
            return self.ends(part.node, place, part.least)
        if isinstance(part, _TypeName):
            return self._type_name(part.cast, place)
        if place >= len(self._tokens):
            return []
        token = self._tokens[place]
        same = token == part if isinstance(part, Token) else token.text == part and token.kind in {"word", "mark"}
        return [place + 1] if same else []

    def _type_name(self, cast: exp.Expr, place: int) -> list[int]:
        for words, name in TYPE_WORDS:
            end = place + len(words)
            if tuple(token.text for token in self._tokens[place:end] if token.kind == "word") == words:
                array = [token.text for token in self._tokens[end : end + 2]] == ["[", "]"]
                self.casts[id(cast)] = f"{name}[]" if array else name
                return [end + 2 if array else end]
        return []


def _forms(node: exp.Expr) -> Iterator[_Form]:
    """Yield the texts of a node, each with its level."""
    kind = type(node)
    this: Any = node.args.get("this")
    other: Any = node.args.get("expression")
    match node:
        case exp.Paren():
            yield _ATOM, ("(", _Operand(this), ")")
        case exp.And() | exp.Or():
            level, word = (_AND, "and") if kind is exp.And else (_OR, "or")
            yield level, _joined([_Operand(each, level + 1) for each in connected(node)], word)
        case exp.Not():
            yield _NOT, ("not", _Operand(this, _NOT))
            yield from _postfix(this, negated=True)
        case exp.In() | exp.Between() | exp.Is() | exp.Like():
            yield from _postfix(node, negated=False)
        case exp.NullSafeNEQ():
            yield _IS, (_Operand(this, _COMPARISON), "is", "distinct", "from", _Operand(other, _COMPARISON))
        case exp.NullSafeEQ():
            yield _IS, (_Operand(this, _COMPARISON), "is", "not", "distinct", "from", _Operand(other, _COMPARISON))
        case exp.Neg():
            yield _MINUS, ("-", _Operand(this, _MINUS))
        case exp.Cast():
            yield _CAST, (_Operand(this, _CAST), "::", _TypeName(node))
            yield _ATOM, ("cast", "(", _Operand(this), "as", _TypeName(node), ")")
            if isinstance(this, exp.Literal) and this.is_string:
                yield _ATOM, (_TypeName(node), _Operand(this))
        case exp.Collate():
            yield (
                _COLLATE,
                (_Operand(this, _COLLATE), "collate", Token("quoted", str(other.this if isinstance(other, exp.Expr) else other))),
            )
        case exp.Case():
            yield _ATOM, _case(node)
        case exp.Array():
            yield _ATOM, ("array", "[", *_listed(node.expressions), "]")
        case exp.Column():
            yield _ATOM, _column(node)
        case exp.Literal():
            yield _ATOM, (Token("string" if node.is_string else "number", str(this)),)
            if not node.is_string and str(this).startswith("0."):
                # sqlglot adds the zero
                yield _ATOM, (Token("number", str(this)[1:]),)
        case exp.Null():
            yield _ATOM, ("null",)
        case exp.Boolean():
            yield _ATOM, ("true" if this else "false",)
    yield from _operations(node)


def _operations(node: exp.Expr) -> Iterator[_Form]:
    """Yield the texts of comparisons, operators and functions."""
    kind = type(node)
    this: Any = node.args.get("this")
    other: Any = node.args.get("expression")
    for sign in _COMPARISONS.get(kind, ()):
        if isinstance(other, exp.Any):
            array = other.this.this if isinstance(other.this, exp.Paren) else other.this
            yield _COMPARISON, (_Operand(this, _IN), sign, "any", "(", _Operand(array), ")")
        elif isinstance(other, exp.Anonymous) and str(other.this).lower() == "all" and len(other.expressions) == 1:
            yield _COMPARISON, (_Operand(this, _IN), sign, "all", "(", _Operand(other.expressions[0]), ")")
        else:
            yield _COMPARISON, (_Operand(this, _IN), sign, _Operand(other, _IN))
    if kind in _ARITHMETIC:
        sign, level = _ARITHMETIC[kind]
        yield level, (_Operand(this, level), sign, _Operand(other, level + 1))
    if kind in _FUNCTIONS or (kind is exp.Anonymous and str(this).lower() == "octet_length"):
        for name in _FUNCTIONS[kind][0] if kind in _FUNCTIONS else ("octet_length",):
            given = arguments(node)
            yield _ATOM, (name, "(", *_listed(given), ")")
            # as the server prints "left" and others
            yield _ATOM, (Token("quoted", name), "(", *_listed(given), ")")
            if kind is exp.Mod:
                # sqlglot adds parentheses
                yield _ATOM, (name, "(", *_listed([each.this if isinstance(each, exp.Paren) else each for each in given]), ")")


def _postfix(node: exp.Expr, *, negated: bool) -> Iterator[_Form]:
    """Yield the texts of IN, BETWEEN, LIKE and IS, which have their NOT in the middle."""
    this: Any = node.args.get("this")
    negated = negated != bool(node.args.get("negate"))
    word = ("not",) if negated else ()
    match node:
        case exp.In() if node.expressions:
            yield _IN, (_Operand(this, _OPERATOR), *word, "in", "(", *_listed(node.expressions), ")")
        case exp.Between() if not _shows_collate(node.args["low"]):
            low, high = _Operand(node.args["low"], _OPERATOR), _Operand(node.args["high"], _OPERATOR)
            yield _IN, (_Operand(this, _OPERATOR), *word, "between", low, "and", high)
        case exp.Like():
            other = node.args["expression"]
            yield _IN, (_Operand(this, _OPERATOR), *word, "like", _Operand(other, _OPERATOR))
            yield _OPERATOR, (_Operand(this, _OPERATOR), "!~~" if negated else "~~", _Operand(other, _PLUS))
        case exp.Is():
            value = node.args["expression"]
            if not isinstance(value, exp.Null | exp.Boolean):
                return
            name = "null" if isinstance(value, exp.Null) else str(value.this).lower()
            # sqlglot adds parentheses
            for each in (this, this.this) if isinstance(this, exp.Paren) else (this,):
                yield _IS, (_Operand(each, _COMPARISON), "is", *word, name)
                if name == "null":
                    yield _IS, (_Operand(each, _COMPARISON), "notnull" if negated else "isnull")


def _shows_collate(node: exp.Expr) -> bool:
    """Whether the text has COLLATE outside of parentheses: ``b_expr`` of the grammar does not allow that."""
    if isinstance(node, exp.Like) or type(node) in _ARITHMETIC:
        return _shows_collate(node.this) or _shows_collate(node.args["expression"])
    return isinstance(node, exp.Collate)


def _column(node: exp.Column) -> tuple[_Part, ...]:
    name = node.this
    if len([value for value in node.args.values() if value]) > 1 or not isinstance(name, exp.Identifier):
        raise unsupported("a column with the name of its table", hint="use the column's name alone")
    if name.args.get("quoted"):
        return (Token("quoted", str(name.this)),)
    word = str(name.this).lower()
    if word in RESERVED:
        raise syntax_error(word)
    return (Token("word", word),)


def _case(node: exp.Case) -> tuple[_Part, ...]:
    parts: list[_Part] = ["case"]
    if node.args.get("this") is not None:
        parts.append(_Operand(node.this))
    for each in node.args["ifs"]:
        parts += ["when", _Operand(each.this), "then", _Operand(each.args["true"])]
    if node.args.get("default") is not None:
        parts += ["else", _Operand(node.args["default"])]
    return (*parts, "end")


def _listed(nodes: Sequence[exp.Expr]) -> list[_Part]:
    return _joined([_Operand(node) for node in nodes], ",")


def _joined(operands: Sequence[_Operand], separator: str) -> list[_Part]:
    parts: list[_Part] = []
    for operand in operands:
        parts += [separator, operand] if parts else [operand]
    return parts
