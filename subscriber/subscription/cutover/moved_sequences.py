"""The sequences of a cutover."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.config.mapping import NO_MAPPING, TableMapping
from subscriber.errors import ConfigurationError
from subscriber.interfaces.sequences import SequenceChoice, SequenceResult, SequenceState
from subscriber.printable import shortened
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.subscription.management.sequences import set_target_sequences

__all__ = ["cutover_sequences", "sequence_left", "sequence_notes", "sequences_step"]


async def cutover_sequences(
    source: str,
    destination: str,
    publications: Sequence[str],
    options: CutoverOptions,
    *,
    dry_run: bool = False,
    mapping: TableMapping = NO_MAPPING,
) -> list[SequenceResult]:
    """Set the sequences of the destination to those of the source, both given by their connection strings.

    Raises:
        SubscriberError: one of the two databases cannot be queried.
    """
    choice = SequenceChoice.parse(options.sequences)
    if choice.kind == "none":
        return []
    return await set_target_sequences(source, destination, publications, choice, mapping, unlogged=options.unlogged, dry_run=dry_run)


def sequence_left(result: SequenceResult) -> ConfigurationError:
    """The error about a sequence that cannot be set."""
    hint = "correct it, or set the sequences yourself and use --sequences none"
    return ConfigurationError(f"{result.place or f'sequence {result.sequence}'} cannot be set: {result.reason}", hint=hint)


def sequence_notes(results: Sequence[SequenceResult]) -> list[str]:
    """What is not set."""
    omitted = [str(each.sequence) for each in results if each.state is SequenceState.OMITTED]
    return [f"{len(omitted):,} sequences are not set, because published columns do not use them: {shortened(omitted)}"] if omitted else []


def sequences_step(sequences: Sequence[str]) -> str:
    """The line of the plan."""
    choice = SequenceChoice.parse(sequences)
    if choice.kind == "none":
        return "set no sequences"
    if choice.kind == "all":
        return "set all sequences of the database"
    return "set the sequences of the published tables" + "".join(f", and {each}" for each in choice.patterns)
