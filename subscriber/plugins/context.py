"""What an output plugin is given: the decoding context, its options and the transaction. The names are those of PostgreSQL's structures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from subscriber.errors import ConfigurationError, TargetError
from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Type
from subscriber.types import TypeRegistry

__all__ = ["LogicalDecodingContext", "OutputPluginOptions", "OutputType", "Record", "ReorderBufferTXN"]


class OutputType(Enum):
    """``OutputPluginOutputType``."""

    BINARY = "binary"
    TEXTUAL = "textual"


@dataclass(slots=True)
class OutputPluginOptions:
    """Set by the plugin in ``startup``.

    Attributes:
        output_type: with ``TEXTUAL``, each record must be valid text in the server encoding.
        receive_rewrites: whether the plugin wants the changes made by table rewrites. pgoutput does not send them, so true is an error.
        complete_relations: whether the plugin's output is wrong if a relation lacks columns or the names of types. Then the publisher's
            catalog is consulted. PostgreSQL has no such option, because there a plugin always has whole relations.
        only_local: whether the plugin wants nothing that has an origin. Then the stream is requested with ``origin = none``: pgoutput does
            not tell the origin of a message outside transactions. PostgreSQL has no such option: it asks ``filter_by_origin`` there, too.
    """

    output_type: OutputType = OutputType.BINARY
    receive_rewrites: bool = False
    complete_relations: bool = False
    only_local: bool = False


@dataclass(slots=True, eq=False)
class ReorderBufferTXN:
    """A transaction.

    Attributes:
        xid: its id. For ``stream_abort`` of a subtransaction, that of the subtransaction.
        toptxn: the top transaction of a subtransaction, else None.
        gid: the identifier of a prepared transaction.
        final_lsn: the commit or prepare record. Not known while the transaction is streamed.
        end_lsn: the end of that record. None while it is not known: pgoutput sends it with the commit.
        xact_time: time of commit, prepare or rollback, microseconds since the PostgreSQL epoch. None while it is not known.
        origin: name of the replication origin, or None. (A server gives its own number of the origin.)
        origin_lsn: the LSN there, if it is known, else 0.
        output_plugin_private: for the plugin.
    """

    xid: int
    toptxn: ReorderBufferTXN | None = None
    gid: str | None = None
    final_lsn: Lsn = INVALID_LSN
    end_lsn: Lsn | None = None
    xact_time: int | None = None
    origin: str | None = None
    origin_lsn: Lsn = INVALID_LSN
    output_plugin_private: Any = None


@dataclass(frozen=True, slots=True)
class Record:
    """One record that the plugin wrote, with the columns of ``pg_logical_slot_get_changes``.

    Attributes:
        lsn: of the change as far as pgoutput tells it: the commit or prepare record, 0 while a transaction is streamed.
        xid: of the transaction, or None outside transactions.
        data: the record.
        last_write: whether this was the last record of the callback.
    """

    lsn: Lsn
    xid: int | None
    data: bytes = field(repr=False)
    last_write: bool


_WRITING_IS_FOR: Final = "writes are only accepted in callbacks of transactions, changes and messages"


class LogicalDecodingContext:
    """The context of one plugin.

    Args:
        name: of the plugin.
        options: for the plugin, as given. None as the value: the option was given without a value.
        capabilities: of the publisher.
        writer: is given each record.
        types: the types of the publisher.
        streaming: whether transactions in progress are given.
        two_phase: whether prepared transactions are given.

    Attributes:
        output_plugin_options: the options.
        output_plugin_private: for the plugin.
        out: the record that is being written. Append text or bytes.
        streaming: a plugin may set it to False in ``startup``.
        twophase: a plugin may set it to False in ``startup``.
        change_xid: the (sub)transaction of the current change of a streamed transaction, else None.
        type_messages: the Type messages of the stream, by oid.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, str | None],
        *,
        capabilities: Capabilities,
        writer: Callable[[Record], None],
        types: TypeRegistry | None = None,
        streaming: bool = False,
        two_phase: bool = False,
    ) -> None:
        self.name = name
        self.output_plugin_options = dict(options)
        self.output_plugin_private: Any = None
        self.capabilities = capabilities
        self.types = types or TypeRegistry()
        self.streaming = streaming
        self.twophase = two_phase
        self.options = OutputPluginOptions()
        self.out: list[str | bytes] = []
        self.change_xid: int | None = None
        self.type_messages: dict[int, Type] = {}
        self.accept_writes = False
        self.write_txn: ReorderBufferTXN | None = None
        self.write_location = INVALID_LSN
        self._prepared = False
        self._writer = writer

    @property
    def sends_empty_transactions(self) -> bool:
        """Whether pgoutput of this publisher sends transactions without published changes."""
        return not self.capabilities.at_least(15)

    def prepare_write(self, last_write: bool = True) -> None:
        """``OutputPluginPrepareWrite``: begin a record.

        Args:
            last_write: whether this is the last record of the callback.

        Raises:
            TargetError: the callback must not write.
        """
        if not self.accept_writes:
            raise TargetError(_WRITING_IS_FOR, hint="write in begin, change, commit, message or their relatives")
        self.out.clear()
        self._prepared = True

    def write(self, last_write: bool = True) -> None:
        """``OutputPluginWrite``: end the record, and pass it on.

        Raises:
            TargetError: :meth:`prepare_write` was not called, or the record is not valid text although the output is textual.
        """
        if not self._prepared:
            raise TargetError("prepare_write needs to be called before write", hint="call prepare_write, append to ctx.out, call write")
        self._prepared = False
        data = b"".join(part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape") for part in self.out)
        if self.options.output_type is OutputType.TEXTUAL:
            self._verify(data)
        self._writer(Record(self.write_location, None if self.write_txn is None else self.write_txn.xid, data, last_write))

    def emit(self, *parts: str | bytes, last_write: bool = True) -> None:
        """Write one record: :meth:`prepare_write`, append the parts, :meth:`write`."""
        self.prepare_write(last_write)
        self.out.extend(parts)
        self.write(last_write)

    def update_progress(self, skipped_xact: bool = False) -> None:
        """``OutputPluginUpdateProgress``. It changes nothing: the publisher gets its feedback also during a long callback."""

    def _verify(self, data: bytes) -> None:
        try:
            valid = "\0" not in data.decode()
        except UnicodeDecodeError:
            valid = False
        if not valid:
            raise TargetError(
                f'output plugin "{self.name}" wrote text that is not valid in encoding "UTF8"',
                hint="set output_type to binary in startup, or write valid text",
            )

    def unknown_options(self, known: Sequence[str]) -> None:
        """Refuse options that the plugin does not know, in PostgreSQL's words.

        Raises:
            ConfigurationError: there is one.
        """
        for name, value in self.output_plugin_options.items():
            if name not in known:
                shown = "(null)" if value is None else value
                raise ConfigurationError(f'option "{name}" = "{shown}" is unknown', hint="options: " + ", ".join(sorted(known)))
