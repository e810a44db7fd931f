"""The tables of publications, as ``pg_get_publication_tables`` gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from subscriber.testing.fake_publisher.backend.results import literals
from subscriber.testing.fake_publisher.publications import Publication, PublishedTable, listed_columns
from subscriber.testing.fake_publisher.tables import FakeTable

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["attribute_numbers", "published_by"]


def published_by(session: Session, names: str) -> Iterator[tuple[Publication, PublishedTable, FakeTable]]:
    """Each publication of the list, with each of its tables."""
    publisher = session.publisher
    for name in literals(names):
        publication = publisher.publications.get(name)
        if publication is None:
            continue
        for table in publisher.tables.values():
            covered = publication.covers(table.shape)
            if covered is not None:
                yield publication, covered, table


def attribute_numbers(session: Session, publication: Publication, covered: PublishedTable, table: FakeTable) -> list[int] | None:
    """``pg_get_publication_tables.attrs``: without a column list NULL in 15, and all columns from 16 on."""
    if covered.columns is None and not session.publisher.caps.at_least(16):
        return None
    return [column.number for column in listed_columns(table.shape, publication, covered)]
