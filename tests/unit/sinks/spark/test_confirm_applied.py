"""With ``confirm=applied`` the position is the applier's: what is landed already comes again, and is passed over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from subscriber.abc import Batch, CopyFormat, Position, PublishedTable, TableEntry, TableName, TableState
from subscriber.apply.table_state import TableStates
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark import SparkSink
from subscriber.transaction.model import Transaction
from tests.unit.sinks.spark.stream import TABLE, begun, make, row, transaction
from tests.unit.sinks.spark.test_applier import all_rounds, applier
from tests.unit.sinks.spark.test_rounds import KEYED, relation, rows

OTHER = TableName("public", "u")
OTHERS = relation("d", ("id", 23, True), ("note", 25, False), number=6, name="u")
COPIED = PublishedTable(
    name=OTHER,
    relation_id=6,
    kind="r",
    columns=("id", "note"),
    key_columns=("id",),
    replica_identity="d",
    column_types=(23, 25),
    column_modifiers=(-1, -1),
)


async def _stream(sink: SparkSink, states: TableStates, sent: Transaction) -> None:
    """As the apply worker does."""
    assert await states.hand(sent.end_lsn, lambda: False)
    await sink.apply(Batch((sent,), states.gate))
    await sink._now.land()


def _of_both() -> Transaction:
    return transaction(400, KEYED, Insert(5, row("2", "b")), OTHERS, Insert(6, row("2", "streamed")))


@pytest.mark.parametrize("confirm", ["landed", "applied"])
async def test_a_table_that_catches_up_is_not_handed_over_below_what_was_landed_without_it(tmp_path: Path, confirm: str) -> None:
    parameters = f"?batch_delay=1h&confirm={confirm}"
    sink, work = await begun(make(tmp_path, parameters)), applier(tmp_path)
    states = TableStates()
    await sink.add_table(OTHER, TableEntry(TableState.INIT))
    states.load(await sink.tables(), Lsn(100))
    await _stream(sink, states, transaction(200, KEYED, Insert(5, row("1", "a"))))
    all_rounds(work)
    copying = sink.open_table(OTHER)
    await copying.begin()
    await copying.start_copy()
    await copying.describe(COPIED)

    async def lines() -> AsyncIterator[bytes]:
        yield b"1\tcopied\n"

    await copying.copy(["id", "note"], CopyFormat.TEXT, lines())
    await copying.finish_copy(Position("sync", "7", 1, Lsn(250)))
    states.set(OTHER, TableEntry(TableState.FINISHEDCOPY))
    await _stream(sink, states, _of_both())
    # the applier is behind, and the process ends
    await copying.close()
    await sink.close()

    sink = make(tmp_path, parameters)
    state = await sink.open("replica", lambda _: None)
    assert state.position is not None
    assert (state.position.lsn, state.taken) == (200 if confirm == "applied" else 400, 400)
    states = TableStates()
    states.load(await sink.tables(), max(state.position.lsn, state.taken))
    copying = sink.open_table(OTHER)
    assert (await copying.begin()).state is TableState.FINISHEDCOPY
    assert not states.try_handover(OTHER, (await copying.position()).lsn)
    await copying.apply(Batch((_of_both(),), lambda sent, _: sent.name == "u"))
    assert states.try_handover(OTHER, Lsn(400))
    await copying.finish_sync(Lsn(400))
    states.complete_handover(OTHER)
    await copying.close()
    if confirm == "applied":
        await _stream(sink, states, _of_both())
    await _stream(sink, states, transaction(500, KEYED, Insert(5, row("3", "c")), OTHERS, Insert(6, row("3", "later"))))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path, name="u") == [(1, "copied"), (2, "streamed"), (3, "later")]
    assert rows(tmp_path, name=TABLE.name) == [(1, "a"), (2, "b"), (3, "c")]
