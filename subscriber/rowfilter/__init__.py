"""Row filters: publications' WHERE clauses, evaluated outside the server. Pure.

``parse_filter`` reads an expression and refuses what PostgreSQL refuses, in its words. ``FilterExpression.bind`` gives it the columns of
a table. ``combine`` joins the filters of several publications, and ``RelationFilters.transform`` applies them to a change. ``stream.py``
applies them to the payloads of a replication stream.

A filter is never evaluated approximately: an expression, type, collation or constant whose meaning on the server is not certain is refused
with a :class:`RowFilterError`.
"""

from subscriber.rowfilter.filter_errors import RowFilterError
from subscriber.rowfilter.filters import FilterExpression, PublicationFilter, RelationFilters, RowFilter, combine, parse_filter

__all__ = ["FilterExpression", "PublicationFilter", "RelationFilters", "RowFilter", "RowFilterError", "combine", "parse_filter"]
