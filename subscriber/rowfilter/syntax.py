"""Parse a row filter, as PostgreSQL's grammar (``gram.y``) reads it.

Operators are ordered by levels, from OR to the cast. An operand without parentheses must have at least the level that its place asks for.
The grammar also accepts some that have a lower one, such as ``a IS NULL = b``: these are refused, and parentheses help.

Source: PostgreSQL manual, Operator Precedence; ``gram.y``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.rowfilter.filter_errors import MUTABLE_FUNCTION, NOT_SIMPLE, RowFilterError, not_allowed, syntax_error, unsupported
from subscriber.rowfilter.lexer import RESERVED, Token, tokens_of
from subscriber.rowfilter.sql_types import TYPE_WORDS

__all__ = ["Node", "parse_expression"]

_DEPTH: Final = 120
_FORMS: Final = "put each operand of an operator into parentheses, and use the forms that the documentation of row filters lists"
_TYPES: Final = "the documentation of row filters lists the types"
# levels of gram.y, from the loosest
_OR, _AND, _NOT, _IS, _COMPARISON, _IN, _OPERATOR, _PLUS, _TIMES, _COLLATE, _MINUS, _CAST, _ATOM = range(1, 14)
_INFIX: Final[dict[str, tuple[int, int]]] = {
    "or": (_OR, _AND),
    "and": (_AND, _NOT),
    **dict.fromkeys(("is", "isnull", "notnull"), (_IS, _COMPARISON)),
    **dict.fromkeys(("=", "<>", "!=", "<", "<=", ">", ">="), (_COMPARISON, _IN)),
    **dict.fromkeys(("in", "between", "like"), (_IN, _OPERATOR)),
    **dict.fromkeys(("||", "~~", "!~~"), (_OPERATOR, _OPERATOR)),
    **dict.fromkeys(("+", "-"), (_PLUS, _PLUS)),
    **dict.fromkeys(("*", "/", "%"), (_TIMES, _TIMES)),
    "collate": (_COLLATE, _COLLATE),
    "::": (_CAST, _CAST),
}
"""What follows its left operand: its level, and the least level of that operand."""
_MANY: Final = 10_000
_FUNCTIONS: Final[dict[str, tuple[str, int, int]]] = {
    "abs": ("abs", 1, 1),
    "char_length": ("length", 1, 1),
    "character_length": ("length", 1, 1),
    "coalesce": ("coalesce", 1, _MANY),
    "greatest": ("greatest", 1, _MANY),
    "least": ("least", 1, _MANY),
    "left": ("left", 2, 2),
    "length": ("length", 1, 1),
    "lower": ("lower", 1, 1),
    "mod": ("mod", 2, 2),
    "nullif": ("nullif", 2, 2),
    "octet_length": ("octet_length", 1, 1),
    "right": ("right", 2, 2),
    "starts_with": ("starts_with", 2, 2),
    "substr": ("substring", 2, 3),
    "substring": ("substring", 2, 3),
    "upper": ("upper", 1, 1),
}
"""Each name of a function: its only name here, and how many arguments it has."""
_SYNTAX: Final = frozenset({"coalesce", "greatest", "least", "nullif"})
"""Those that are no functions in quotes."""
_AGGREGATES: Final = frozenset({"array_agg", "avg", "bool_and", "bool_or", "count", "every", "max", "min", "string_agg", "sum"})
_MUTABLE_NAMES: Final = """
    now random clock_timestamp statement_timestamp transaction_timestamp timeofday current_date current_time current_timestamp localtime
    localtimestamp current_user session_user system_user current_role user current_catalog current_schema nextval currval lastval setval
    gen_random_uuid uuidv7 to_char to_date version pg_sleep current_setting set_config concat concat_ws format
    current_database inet_client_addr txid_current pg_backend_pid
"""
_MUTABLE: Final = frozenset(_MUTABLE_NAMES.split())
"""Built-in functions of which no form is immutable."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a filter.

    ====================  ===========================================  =========================================
    kind                  parts                                        text
    ====================  ===========================================  =========================================
    string, number                                                     the constant
    null, true, false
    column                                                             its name
    and, or               two or more
    not, negative         one
    is                    one                                          ``null``, ``not true``, …
    distinct              two                                          ``not`` for IS NOT DISTINCT FROM
    compare, operator     two                                          the operator
    any, all              the left side and the array                  the operator
    in                    the left side and the items
    between               the value and both bounds                    ``symmetric``, if it is
    like                  two
    cast                  one                                          the type, as :data:`TYPE_WORDS` names it
    collate               one                                          the collation
    case                  condition and result, …, the default
    case of               the value; as CASE
    array, call           elements or arguments                        the function
    ====================  ===========================================  =========================================

    Attributes:
        depth: the most nodes from here to a leaf.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    text: str = ""
    depth: int = 1


def parse_expression(text: str) -> Node:
    """Parse a filter.

    Raises:
        RowFilterError: it is not an expression, or uses what row filters may not use.
    """
    tokens = tokens_of(text)
    if not tokens:
        raise syntax_error("")
    _check_words(tokens)
    return _Parser(tokens).whole()


def _check_words(tokens: Sequence[Token]) -> None:
    """Refuse what PostgreSQL refuses by name."""
    for place, token in enumerate(tokens):
        following = tokens[place + 1].text if place + 1 < len(tokens) and tokens[place + 1].kind == "mark" else ""
        if token.kind == "word" and token.text in _MUTABLE and (following == "(" or token.text in RESERVED):
            raise not_allowed(NOT_SIMPLE if token.text in RESERVED else MUTABLE_FUNCTION)
        if token.kind == "word" and (token.text in {"select", "table"} or (token.text in {"exists", "values"} and following == "(")):
            raise not_allowed(NOT_SIMPLE)


def _node(kind: str, *parts: Node, text: str = "") -> Node:
    depth = 1 + max((part.depth for part in parts), default=0)
    if depth > _DEPTH:
        raise _too_deep()
    return Node(kind, parts, text, depth)


def _too_deep() -> RowFilterError:
    return unsupported("it is nested too deeply")


def _differs() -> RowFilterError:
    return unsupported("PostgreSQL may read it differently", hint=_FORMS)


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    def whole(self) -> Node:
        found = self._expression()
        if self._place < len(self._tokens):
            raise self._unexpected()
        return found

    # --- tokens

    def _token(self, ahead: int = 0) -> Token:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else Token("end", "")

    def _is(self, *texts: str) -> bool:
        """Whether these keywords and marks follow."""
        found = map(self._token, range(len(texts)))
        return all(token.kind in {"word", "mark"} and token.text == text for token, text in zip(found, texts, strict=True))

    def _take(self, *texts: str) -> bool:
        if not self._is(*texts):
            return False
        self._place += len(texts)
        return True

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._unexpected()

    def _unexpected(self) -> RowFilterError:
        token = self._token()
        what = {"end": "it ends too early", "string": "a constant in this place"}.get(token.kind, f'"{token.text}" in this place')
        return unsupported(what, hint=_FORMS)

    # --- operators

    def _expression(self, least: int = _OR) -> Node:
        """An expression of at least this level."""
        self._depth += 1
        if self._depth > _DEPTH:
            raise _too_deep()
        node, level = self._prefixed(least)
        while (found := self._operation(node, level, least)) is not None:
            node, level = found
        self._depth -= 1
        return node

    def _prefixed(self, least: int) -> tuple[Node, int]:
        if self._take("not"):
            if least > _NOT:
                raise _differs()
            return _node("not", self._expression(_NOT)), _NOT
        if self._take("-"):
            part = self._expression(_MINUS)
            if part.kind == "number":
                # the grammar makes one constant of them: -2147483648 is an integer
                return _node("number", text=part.text[1:] if part.text.startswith("-") else f"-{part.text}"), _MINUS
            return _node("negative", part), _MINUS
        return self._atom(), _ATOM

    def _operation(self, left: Node, level: int, least: int) -> tuple[Node, int] | None:
        """The operator that follows its left operand, with the others; None: there is none of at least this level."""
        negated = any(self._is("not", word) for word in ("in", "between", "like"))
        token = self._token(1 if negated else 0)
        if token.kind not in {"word", "mark"} or token.text not in _INFIX:
            return None
        own, needed = _INFIX[token.text]
        if own < least:
            return None
        if level < needed:
            raise _differs()
        self._place += 2 if negated else 1
        found = self._applied(token.text, left)
        return (_node("not", found) if negated else found), own

    def _applied(self, operator: str, left: Node) -> Node:
        own, needed = _INFIX[operator]
        match operator:
            case "and" | "or":
                operands = [left, self._expression(needed)]
                while self._take(operator):
                    operands.append(self._expression(needed))
                return _node(operator, *operands)
            case "isnull" | "notnull":
                return _node("is", left, text="null" if operator == "isnull" else "not null")
            case "is":
                return self._test(left)
            case "in":
                self._expect("(")
                return _node("in", left, *self._list(")"))
            case "between":
                symmetric = self._take("symmetric")
                if not symmetric:
                    self._take("asymmetric")
                low = self._low()
                self._expect("and")
                return _node("between", left, low, self._expression(_OPERATOR), text="symmetric" if symmetric else "")
            case "like":
                return _node("like", left, self._expression(_OPERATOR))
            case "~~" | "!~~":
                found = _node("like", left, self._expression(_PLUS))
                return found if operator == "~~" else _node("not", found)
            case "collate":
                collation = self._token()
                if collation.kind != "quoted":
                    raise self._unexpected()
                self._place += 1
                return _node("collate", left, text=collation.text)
            case "::":
                return _node("cast", left, text=self._type())
        if own != _COMPARISON:
            return _node("operator", left, self._expression(own + 1), text=operator)
        sign = "<>" if operator == "!=" else operator
        for word, kind in (("any", "any"), ("some", "any"), ("all", "all")):
            if self._take(word, "("):
                array = self._expression()
                self._expect(")")
                return _node(kind, left, array, text=sign)
        return _node("compare", left, self._expression(_IN), text=sign)

    def _test(self, left: Node) -> Node:
        """What follows IS."""
        word = "not " if self._take("not") else ""
        if self._take("distinct", "from"):
            return _node("distinct", left, self._expression(_COMPARISON), text=word.strip())
        for name in ("null", "true", "false", "unknown"):
            if self._take(name):
                return _node("is", left, text=word + name)
        raise self._unexpected()

    def _low(self) -> Node:
        """The lower bound of BETWEEN: ``b_expr`` of the grammar, which has COLLATE only inside of something."""
        begin = self._place
        found = self._expression(_OPERATOR)
        inside = 0
        for token in self._tokens[begin : self._place]:
            if token.kind in {"word", "mark"}:
                inside += (token.text in {"(", "[", "case"}) - (token.text in {")", "]", "end"})
                if token.text == "collate" and not inside:
                    raise _differs()
        return found

    # --- atoms

    def _atom(self) -> Node:
        token = self._token()
        if token.kind in {"string", "number"}:
            self._place += 1
            return _node(token.kind, text=token.text)
        if self._take("("):
            found = self._expression()
            self._expect(")")
            return found
        if token.kind not in {"word", "quoted"}:
            raise self._unexpected()
        if token.kind == "word" and (keyword := self._keyword(token.text)) is not None:
            return keyword
        after = self._token(1)
        if after.kind == "mark" and after.text == "(":
            return self._call(token)
        if after.kind == "mark" and after.text == ".":
            raise unsupported("a column with the name of its table", hint="use the column's name alone")
        if token.kind == "word" and token.text in RESERVED:
            raise syntax_error(token.text)
        if after.kind == "string":
            raise unsupported(f"a constant of type {token.text}", hint=_TYPES)
        self._place += 1
        return _node("column", text=token.text)

    def _keyword(self, word: str) -> Node | None:
        """What a keyword begins; None: it is a name."""
        if word in {"null", "true", "false"}:
            self._place += 1
            return _node(word)
        if word in {"any", "some", "all"}:
            raise unsupported(
                f"{word.upper()} that does not follow a comparison operator", hint="write each LIKE out, with OR or AND between them"
            )
        if self._take("case"):
            return self._case()
        if self._take("array", "["):
            return _node("array", *self._list("]"))
        if self._take("cast", "("):
            part = self._expression()
            self._expect("as")
            name = self._type()
            self._expect(")")
            return _node("cast", part, text=name)
        begin = self._place
        found = self._found_type()
        if found is not None and not found.endswith("[]") and self._token().kind == "string":
            return _node("cast", self._atom(), text=found)
        self._place = begin
        return None

    def _type(self) -> str:
        token = self._token()
        found = self._found_type()
        if token.kind not in {"word", "quoted"}:
            raise self._unexpected()
        if found is None or self._is("("):
            what = f"a cast to {token.text} with a length or precision" if found else f"a cast to {token.text}"
            raise unsupported(what, hint=_TYPES)
        return found

    def _found_type(self) -> str | None:
        for words, name in TYPE_WORDS:
            if all(self._token(ahead) == Token("word", word) for ahead, word in enumerate(words)):
                self._place += len(words)
                return f"{name}[]" if self._take("[", "]") else name
        return None

    def _case(self) -> Node:
        parts = [] if self._is("when") else [self._expression()]
        kind = "case of" if parts else "case"
        if not self._is("when"):
            raise self._unexpected()
        while self._take("when"):
            parts.append(self._expression())
            self._expect("then")
            parts.append(self._expression())
        parts.append(self._expression() if self._take("else") else _node("null"))
        self._expect("end")
        return _node(kind, *parts)

    def _call(self, name: Token) -> Node:
        if name.text in _AGGREGATES:
            raise RowFilterError("aggregate functions are not allowed in WHERE", sqlstate="42803")
        # the server prints "left" and others in quotes
        if name.text not in _FUNCTIONS or (name.kind == "quoted" and name.text in _SYNTAX):
            raise unsupported(f"function {name.text}", hint=f"functions that can be evaluated: {', '.join(sorted(_FUNCTIONS))}")
        self._place += 2
        function, fewest, most = _FUNCTIONS[name.text]
        parts = self._list(")")
        if not fewest <= len(parts) <= most:
            raise unsupported(f"function {name.text} with {len(parts)} arguments")
        return _node("operator", *parts, text="%") if function == "mod" else _node("call", *parts, text=function)

    def _list(self, end: str) -> list[Node]:
        """Expressions up to the mark that ends them: at least one."""
        found = [self._expression()]
        while self._take(","):
            found.append(self._expression())
        self._expect(end)
        return found
