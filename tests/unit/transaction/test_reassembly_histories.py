"""Random histories of a publisher: the rows that come out are exactly those that were not rolled back, for any point of spilling."""

from __future__ import annotations

from hypothesis import strategies as st

from subscriber.protocol.messages import CommitPrepared, LogicalMessage, RollbackPrepared
from subscriber.transaction.model import Event, PreparedTransaction, Transaction
from subscriber.transaction.reassembly import Reassembly, SpoolDiscard, SpoolTruncate
from tests.support.examples import property_test
from tests.unit.transaction.publisher_model import Expected, Publisher
from tests.unit.transaction.traces import label_of


class Subscriber:
    """Feeds reassembly, carries out its orders on lists, and reads the transactions as a sink does."""

    def __init__(self) -> None:
        self.events: list[Expected] = []
        self.reassembly = Reassembly()
        self.spool: dict[int, list[bytes]] = {}
        self._relation_known = False
        self._followed: dict[int, list[bytes]] = {}

    def follow(self) -> None:
        """As parallel apply: read a part of what is available of each transaction before its end."""
        for stream in self.reassembly.streams:
            read = self._followed.setdefault(stream.spool_id, [])
            if (cut := stream.take_cut()) is not None:
                del read[cut:]
            assert stream.available(len(self.events)) == stream.count
            start, stop = len(read), (len(read) + stream.count + 1) // 2
            read += self.spool[stream.spool_id][start:stop] if start < stream.spilled else stream.held(start, stop)
            if stream.spool_id % 2:
                stream.applied = len(read)

    def feed(self, payload: bytes) -> None:
        for output in self.reassembly.feed(payload):
            if isinstance(output, SpoolTruncate):
                assert 0 < output.count < len(self.spool[output.spool_id])
                del self.spool[output.spool_id][output.count :]
            elif isinstance(output, SpoolDiscard):
                del self.spool[output.spool_id]
            else:
                self.take(output)

    def spill(self) -> None:
        before = self.reassembly.memory
        spill = self.reassembly.spill()
        if spill is None:
            assert before == 0
            return
        spool_id, records = spill
        assert records
        assert self.reassembly.memory < before
        self.spool.setdefault(spool_id, []).extend(records)

    def take(self, event: Event) -> None:
        match event:
            case Transaction():
                self.events.append(Expected("commit", event.xid, self._rows(event)))
            case PreparedTransaction(transaction, gid):
                assert gid == f"gid{transaction.xid}"
                self.events.append(Expected("prepare", transaction.xid, self._rows(transaction)))
            case CommitPrepared(xid=xid):
                self.events.append(Expected("commit prepared", xid))
                self._has_ended(xid)
            case RollbackPrepared(xid=xid):
                self.events.append(Expected("rollback prepared", xid))
                self._has_ended(xid)
            case LogicalMessage(content=content):
                self.events.append(Expected("message", 0, (content.decode(),)))

    def _has_ended(self, xid: int) -> None:
        """Also if it was streamed again."""
        assert xid not in {stream.xid for stream in self.reassembly.streams}

    def _rows(self, transaction: Transaction) -> tuple[str, ...]:
        spilled = self.spool.pop(transaction.spool_id, [])
        assert len(spilled) == transaction.spilled
        records = spilled + transaction.records
        followed = self._followed.pop(transaction.spool_id, [])
        assert followed == records[: len(followed)]
        assert transaction.count == len(records)
        assert transaction.size == sum(map(len, records))
        # the publisher describes relations again in each stream, so dropped descriptions are not missed
        known = self._relation_known and not transaction.prefixed
        rows = []
        for payload in records:
            label = label_of(payload, prefixed=transaction.prefixed)
            if payload[:1] == b"R":
                known = self._relation_known = True
                continue
            assert known or payload[:1] == b"M"
            rows.append(label)
        return tuple(rows)


def play(history: bytes) -> Subscriber:
    publisher = Publisher(history)
    subscriber = Subscriber()
    for payload in publisher.sent:
        if payload is None:
            subscriber.spill()
        else:
            subscriber.feed(payload)
            subscriber.follow()
    assert subscriber.events == publisher.expected
    return subscriber


@property_test(400, 6000, st.binary(min_size=40, max_size=160))
def test_surviving_rows(history: bytes) -> None:
    subscriber = play(history)
    # what is left belongs to streams that end in no commit: the last session's empty ones, and those of what is still prepared
    assert set(subscriber.spool) <= {order.spool_id for order in subscriber.reassembly.reset()}


@property_test(20, 300, st.binary(min_size=400, max_size=900))
def test_surviving_rows_of_long_histories(history: bytes) -> None:
    play(history)


def test_model_generates_every_case() -> None:
    """The histories above are worth something: each kind of message, cut and event is among them."""
    seen = set()
    kinds = set()
    rolled_back = 0
    for seed in range(60):
        history = bytes((seed * 7919 + position * position * 31 + position * seed * 17) % 256 for position in range(600))
        publisher = Publisher(history)
        seen |= {chr(payload[0]) for payload in publisher.sent if payload}
        kinds |= {event.kind for event in publisher.expected}
        rolled_back += sum(payload is not None and payload[:1] == b"A" and payload[1:5] != payload[5:9] for payload in publisher.sent)
    assert seen == set("BCbPKrSEcpAIUDTRM")
    assert kinds == {"commit", "prepare", "commit prepared", "rollback prepared", "message"}
    assert rolled_back > 100
