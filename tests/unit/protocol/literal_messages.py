"""Every message with its bytes, written out by hand from the manual (Logical Replication Message Formats): fields separated by blanks.

``OUTSIDE`` holds them as they are outside a streamed block; ``INSIDE`` those that carry a (sub)transaction id inside one.
"""

from __future__ import annotations

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
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

LSN = Lsn.parse("16/B374D848")
END = Lsn.parse("16/B374D878")
XID = 731
SUBXID = 0xFFFF_FFFF  # the highest: an unsigned number
RELATION = 0x4001
OID = 0x8000_0001  # above 2^31: oids are unsigned

ROW = TupleData(b"tnub", [b"42", None, None, b"\x00\x01"])
ROW_BYTES = "0004  74 00000002 3432  6e  75  62 00000002 0001"
KEY = TupleData(b"tnnn", [b"42", None, None, None])
KEY_BYTES = "0004  74 00000002 3432  6e 6e 6e"
EMPTY = TupleData(b"", [])

LSN_BYTES = "00000016 b374d848"
END_BYTES = "00000016 b374d878"
TIME = -1  # one microsecond before the epoch: times are signed
TIME_BYTES = "ffffffffffffffff"
LATER = 757_382_400_000_000
LATER_BYTES = "0002b0d5d4e94000"

OUTSIDE: list[tuple[Message, str]] = [
    (Begin(LSN, LATER, XID), f"42 {LSN_BYTES} {LATER_BYTES} 000002db"),
    (Begin(Lsn(0xFFFF_FFFF_FFFF_FFFF), TIME, SUBXID), f"42 ffffffffffffffff {TIME_BYTES} ffffffff"),
    (Commit(0, LSN, END, LATER), f"43 00 {LSN_BYTES} {END_BYTES} {LATER_BYTES}"),
    (Commit(0x81, LSN, END, LATER), f"43 81 {LSN_BYTES} {END_BYTES} {LATER_BYTES}"),
    (Origin(LSN, "pg_16389"), f"4f {LSN_BYTES} 70675f313633383900"),
    (Origin(LSN, ""), f"4f {LSN_BYTES} 00"),
    (
        Relation(
            RELATION,
            "public",
            "t",
            "d",
            (Column("id", 23, -1, True), Column("ü", OID, 24, False)),
        ),
        "52 00004001 7075626c696300 7400 64 0002  01 696400 00000017 ffffffff  00 c3bc00 80000001 00000018",
    ),
    (Relation(OID, "pg_catalog", "none", "n", ()), "52 80000001 00 6e6f6e6500 6e 0000"),
    (Relation(1, "a", "b", "f", ()), "52 00000001 6100 6200 66 0000"),
    (Relation(1, "a", "b", "i", ()), "52 00000001 6100 6200 69 0000"),
    (Relation(1, "a", "\udcff", "d", ()), "52 00000001 6100 ff00 64 0000"),  # not UTF-8: kept
    (Type(OID, "public", "mood"), "59 80000001 7075626c696300 6d6f6f6400"),
    (Type(25, "pg_catalog", "text"), "59 00000019 00 7465787400"),
    (Insert(RELATION, ROW), f"49 00004001 4e {ROW_BYTES}"),
    (Insert(OID, EMPTY), "49 80000001 4e 0000"),
    (Update(RELATION, None, None, ROW), f"55 00004001 4e {ROW_BYTES}"),
    (Update(RELATION, KEY, None, ROW), f"55 00004001 4b {KEY_BYTES} 4e {ROW_BYTES}"),
    (Update(RELATION, None, ROW, ROW), f"55 00004001 4f {ROW_BYTES} 4e {ROW_BYTES}"),
    (Delete(RELATION, KEY, None), f"44 00004001 4b {KEY_BYTES}"),
    (Delete(RELATION, None, ROW), f"44 00004001 4f {ROW_BYTES}"),
    (Truncate(TruncateOption(0), (RELATION,)), "54 00000001 00 00004001"),
    (Truncate(TruncateOption.CASCADE, (RELATION, OID)), "54 00000002 01 00004001 80000001"),
    (Truncate(TruncateOption.RESTART_IDENTITY, ()), "54 00000000 02"),
    (Truncate(TruncateOption.CASCADE | TruncateOption.RESTART_IDENTITY, (1,)), "54 00000001 03 00000001"),
    (Truncate(TruncateOption(0x83), (1,)), "54 00000001 83 00000001"),
    (LogicalMessage(True, LSN, "p", b"\x00\xff"), f"4d 01 {LSN_BYTES} 7000 00000002 00ff"),
    (LogicalMessage(False, LSN, "", b""), f"4d 00 {LSN_BYTES} 00 00000000"),
    (StreamStart(XID, True), "53 000002db 01"),
    (StreamStart(SUBXID, False), "53 ffffffff 00"),
    (StreamStop(), "45"),
    (StreamCommit(XID, 0, LSN, END, LATER), f"63 000002db 00 {LSN_BYTES} {END_BYTES} {LATER_BYTES}"),
    (StreamAbort(XID, SUBXID), "41 000002db ffffffff"),
    (StreamAbort(XID, XID, LSN, LATER), f"41 000002db 000002db {LSN_BYTES} {LATER_BYTES}"),
    (BeginPrepare(LSN, END, LATER, XID, "gid 'x'"), f"62 {LSN_BYTES} {END_BYTES} {LATER_BYTES} 000002db 67696420277827 00"),
    (Prepare(0, LSN, END, LATER, XID, "g"), f"50 00 {LSN_BYTES} {END_BYTES} {LATER_BYTES} 000002db 6700"),
    (CommitPrepared(0, LSN, END, LATER, XID, "g"), f"4b 00 {LSN_BYTES} {END_BYTES} {LATER_BYTES} 000002db 6700"),
    (
        RollbackPrepared(0, LSN, END, TIME, LATER, XID, "g"),
        f"72 00 {LSN_BYTES} {END_BYTES} {TIME_BYTES} {LATER_BYTES} 000002db 6700",
    ),
    (StreamPrepare(0, LSN, END, LATER, XID, "g"), f"70 00 {LSN_BYTES} {END_BYTES} {LATER_BYTES} 000002db 6700"),
]

INSIDE: list[tuple[Message, str]] = [
    (
        Relation(RELATION, "public", "t", "d", (Column("id", 23, -1, True),), SUBXID),
        "52 ffffffff 00004001 7075626c696300 7400 64 0001 01 696400 00000017 ffffffff",
    ),
    (Type(OID, "public", "mood", XID), "59 000002db 80000001 7075626c696300 6d6f6f6400"),
    (Insert(RELATION, ROW, XID), f"49 000002db 00004001 4e {ROW_BYTES}"),
    (Update(RELATION, KEY, None, ROW, XID), f"55 000002db 00004001 4b {KEY_BYTES} 4e {ROW_BYTES}"),
    (Delete(RELATION, KEY, None, XID), f"44 000002db 00004001 4b {KEY_BYTES}"),
    (Truncate(TruncateOption.CASCADE, (RELATION,), XID), "54 000002db 00000001 01 00004001"),
    (LogicalMessage(True, LSN, "p", b"x", XID), f"4d 000002db 01 {LSN_BYTES} 7000 00000001 78"),
]
