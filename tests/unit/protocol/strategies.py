"""Hypothesis strategies for every message that the wire can carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    BINARY,
    NULL,
    TEXT,
    UNCHANGED,
    Begin,
    BeginPrepare,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TruncateOption,
    TupleData,
    Type,
    Update,
)

lsns = st.integers(0, 2**64 - 1).map(Lsn)
times = st.integers(-(2**63), 2**63 - 1)
uint32 = st.integers(0, 2**32 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
flags = st.integers(0, 255)
# any bytes but null, as the decoder reads them: also what is no UTF-8
texts = st.binary(max_size=20).map(lambda data: data.replace(b"\0", b"x").decode("utf-8", "surrogateescape")) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
namespaces = st.just("pg_catalog") | texts.filter(bool)

_columns_of_tuples = st.one_of(
    st.tuples(st.sampled_from([TEXT, BINARY]), st.binary(max_size=20)),
    st.tuples(st.sampled_from([NULL, UNCHANGED]), st.none()),
)


def _tuple_data(columns: Sequence[tuple[int, bytes] | tuple[int, None]]) -> TupleData:
    return TupleData(bytes(kind for kind, _ in columns), [value for _, value in columns])


tuples = st.lists(_columns_of_tuples, max_size=12).map(_tuple_data)
_columns = st.builds(Column, texts, uint32, int32, st.booleans())
_old_or_key = st.one_of(st.tuples(st.none(), tuples), st.tuples(tuples, st.none()))


def _update(relation_id: int, pair: tuple[TupleData | None, TupleData | None], new: TupleData, xid: int | None) -> Update:
    return Update(relation_id, *pair, new, xid)


def _delete(relation_id: int, pair: tuple[TupleData | None, TupleData | None], xid: int | None) -> Delete:
    return Delete(relation_id, *pair, xid)


def prefixable(xids: st.SearchStrategy[int | None]) -> st.SearchStrategy[Message]:
    """The messages that carry a (sub)transaction id inside a streamed block."""
    return st.one_of(
        st.builds(Relation, uint32, namespaces, texts, st.sampled_from("dnfi"), st.lists(_columns, max_size=5).map(tuple), xids),
        st.builds(Type, uint32, namespaces, texts, xids),
        st.builds(Insert, uint32, tuples, xids),
        st.builds(_update, uint32, st.tuples(st.none(), st.none()) | _old_or_key, tuples, xids),
        st.builds(_delete, uint32, _old_or_key, xids),
        st.builds(Truncate, flags.map(TruncateOption), st.lists(uint32, max_size=5).map(tuple), xids),
        st.builds(LogicalMessage, st.booleans(), lsns, texts, st.binary(max_size=30), xids),
    )


_prepared: list[Callable[..., Message]] = [Prepare, CommitPrepared, StreamPrepare]
unprefixable: st.SearchStrategy[Message] = st.one_of(
    st.builds(Begin, lsns, times, uint32),
    st.builds(Commit, flags, lsns, lsns, times),
    st.builds(Origin, lsns, texts),
    st.builds(StreamStart, uint32, st.booleans()),
    st.just(StreamStop()),
    st.builds(StreamCommit, uint32, flags, lsns, lsns, times),
    st.builds(StreamAbort, uint32, uint32),
    st.builds(StreamAbort, uint32, uint32, lsns, times),
    st.builds(BeginPrepare, lsns, lsns, times, uint32, texts),
    *(st.builds(kind, flags, lsns, lsns, times, uint32, texts) for kind in _prepared),
    st.builds(RollbackPrepared, flags, lsns, lsns, times, times, uint32, texts),
)

outside_streams: st.SearchStrategy[Message] = prefixable(st.none()) | unprefixable
inside_streams: st.SearchStrategy[Message] = prefixable(uint32) | unprefixable
