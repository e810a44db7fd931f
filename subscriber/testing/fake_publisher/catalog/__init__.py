"""The queries that clients are known to send, recognized by their text.

There is no SQL engine. Each client has a module with a table of its queries; a query is a text with holes, and a handler that answers it
from the state of the publisher. A query that is in no table ends in an error that shows its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend.results import CopyResult, KnownQuery, Result, normalized
from subscriber.testing.fake_publisher.catalog import copies, general, jdbc, native, own, sequences, slots

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["FoundQuery", "find_query"]

_QUERIES: Final = (*general.QUERIES, *slots.QUERIES, *own.QUERIES, *sequences.QUERIES, *native.QUERIES, *jdbc.QUERIES, *copies.QUERIES)


@dataclass(frozen=True, slots=True)
class FoundQuery:
    """A recognized query and its parameters."""

    query: KnownQuery
    values: Mapping[str, str]

    @property
    def ends_transaction(self) -> bool:
        """Whether it is allowed in a failed transaction."""
        return self.query.handler in general.ENDINGS

    async def run(self, session: Session) -> Result | CopyResult:
        """Answer it."""
        answer = self.query.handler(session, self.values)
        return answer if isinstance(answer, Result | CopyResult) else await answer


def find_query(text: str) -> FoundQuery | None:
    """Recognize a statement; None: it is not known."""
    plain = normalized(text)
    for query in _QUERIES:
        values = query.match(plain)
        if values is not None:
            return FoundQuery(query, values)
    return None
