"""Call the callbacks of an output plugin, and the methods of one that is a target."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, Final

from subscriber.errors import ConfigurationError, SubscriberError, TargetError
from subscriber.plugins.callbacks import TARGET_METHODS, OutputPluginCallbacks
from subscriber.plugins.context import LogicalDecodingContext, OutputPluginOptions, Record, ReorderBufferTXN
from subscriber.protocol.lsn import INVALID_LSN, Lsn

__all__ = ["PluginCalls"]

_SILENT: Final = frozenset({"startup", "shutdown", "filter_by_origin", "filter_prepare", *TARGET_METHODS})
"""Callbacks that must not write."""


class PluginCalls:
    """Calls the callbacks of one plugin.

    Args:
        plugin: an object with callbacks as methods (:mod:`subscriber.plugins.callbacks`).
        context: of the plugin. Transactions in progress and prepared ones are given only to a plugin that has callbacks for them.

    Attributes:
        callbacks: of the plugin.
        context: of the plugin.

    Raises:
        ConfigurationError: a required callback is missing.
    """

    def __init__(self, plugin: object, context: LogicalDecodingContext) -> None:
        self.callbacks = OutputPluginCallbacks(plugin, context.name)
        self.context = context
        context.streaming &= self.callbacks.streaming
        context.twophase &= self.callbacks.two_phase

    @property
    def options(self) -> OutputPluginOptions:
        """What the plugin set in ``startup``."""
        return self.context.options

    def start(self, *, is_init: bool = False) -> None:
        """Call ``startup``.

        Args:
            is_init: whether the slot was just created.

        Raises:
            ConfigurationError: an option is not valid, or pgoutput cannot give what the plugin wants.
        """
        context = self.context
        streaming, two_phase = context.streaming, context.twophase
        self.call("startup", context, context.options, is_init)
        context.streaming &= streaming
        context.twophase &= two_phase
        if context.options.receive_rewrites:
            raise ConfigurationError(
                f'output plugin "{context.name}" wants the changes of table rewrites, which pgoutput does not send',
                hint="omit the option (test_decoding: include-rewrites)",
            )

    def shutdown(self) -> None:
        """Call ``shutdown``."""
        self.call("shutdown", self.context)

    # --- a plugin that is a target

    def send(self, record: Record) -> None:
        """Give a record that the plugin wrote to its ``send``.

        Raises:
            ConfigurationError: it has none.
        """
        if self.callbacks.get("send") is None:
            raise ConfigurationError(
                f'output plugin "{self.context.name}" writes records, but has no method send',
                hint="derive a class from it that defines send(ctx, record)",
            )
        self.call("send", self.context, record, lsn=record.lsn)

    def flush(self) -> None:
        """Wait until everything that was sent is stored."""
        self.call("flush", self.context)

    def position(self) -> Lsn | None:
        """The position that the plugin stores with its data, or None.

        Raises:
            ConfigurationError: its answer is not an LSN.
        """
        found = self.call("position", self.context)
        try:
            return None if found is None else Lsn.parse(found) if isinstance(found, str) else Lsn(found)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f'output plugin "{self.context.name}": position did not return an LSN', hint="return the stored txn.end_lsn"
            ) from error

    def advance(self, lsn: Lsn) -> None:
        """Let the plugin store a position before which nothing is missing."""
        self.call("advance", self.context, lsn, lsn=lsn)

    def call(self, callback: str, *arguments: Any, txn: ReorderBufferTXN | None = None, lsn: Lsn | None = None) -> Any:
        """Call a callback, if the plugin has it. ``txn`` and ``lsn`` are the transaction and the place of what it writes.

        Raises:
            SubscriberError: the plugin failed.
        """
        method = self.callbacks.get(callback)
        if method is None:
            return None
        context = self.context
        context.accept_writes = callback not in _SILENT
        context.write_txn = txn
        context.write_location = lsn or (INVALID_LSN if txn is None else txn.final_lsn)
        try:
            return method(*arguments)
        except SubscriberError as error:
            error.add_note(f'in the {callback} callback of output plugin "{context.name}", associated LSN {context.write_location}')
            raise
        except Exception as error:
            raise _failed(context, callback, error) from error
        finally:
            context.accept_writes = False


def _failed(context: LogicalDecodingContext, callback: str, error: Exception) -> TargetError:
    """The error of a plugin. Its text may hold a row's value, so only its class and place are shown."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TargetError(
        f'output plugin "{context.name}" raised {type(error).__name__} in its {callback} callback, at {Path(frame.filename).name}:'
        f"{frame.lineno}, associated LSN {context.write_location}",
        hint="fix the plugin; the transaction is not acknowledged, and comes again",
    )
