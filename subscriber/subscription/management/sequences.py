"""``sequences sync``: set the target's sequences to those of the publisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from subscriber.catalog.target_kind import SequencesKind
from subscriber.config.mapping import TableMapping
from subscriber.errors import ConfigurationError
from subscriber.interfaces.sequences import SequenceChoice, SequenceResult, SequenceState
from subscriber.printable import shortened
from subscriber.subscription.management.publisher import find_publisher
from subscriber.subscription.targets import is_postgres, required_ability
from subscriber.walreceiver.sequences import read_sequences
from subscriber.walreceiver.session import Session

__all__ = ["default_sequences", "require_named", "set_target_sequences", "sync_sequences"]

_APPLICATION: Final = "subscriber sequences"
_UNREADABLE: Final = "the role may not read it on the publisher: GRANT SELECT ON SEQUENCE, and USAGE on its schema"
_UNNAMED: Final = "no column of a published table uses it: name it with --sequences, or leave such sequences out with --sequences owned"


async def sync_sequences(
    name: str | None = None,
    *,
    target: str,
    connection: str | None = None,
    publications: Sequence[str] = (),
    sequences: Sequence[str] = (),
    unlogged: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> list[SequenceResult]:
    """Set the target's sequences to those of the publisher, so that no value repeats.

    Nothing may take values on the publisher after this has begun: values that are taken later are not known to the target.

    Args:
        name: of a subscription of the target; its publisher and publications are used. None: ``connection`` is given.
        target: URL or conninfo of the target.
        connection: connection string of the publisher, without ``name``, or for a subscription that its command line defines.
        publications: the sequences of their tables; with ``name``, instead of those of the subscription.
        sequences: which ones: ``all`` of the database, without those of extensions; ``owned``: those of published tables; and names, with
            ``*`` and ``?``. Default: all if the publications have all tables of the database, else the owned ones. Then sequences that no
            column of any table owns, and no published column uses, are results with the state ``left``.
        unlogged: also those that unlogged tables use.
        force: also set a sequence back that is ahead of the publisher.
        dry_run: change nothing.

    Returns:
        What was done about each sequence, or would be done. SQLAlchemy's targets have one result for each column.

    Raises:
        ConfigurationError: the publisher is not known, no sequence was chosen, a name does not exist, or the target has no sequences.
        PublisherError: the publisher cannot be read, or a publication does not exist.
        TargetError: the subscription does not exist, or the target cannot be reached.
    """
    required_ability(target, SequencesKind, "has no sequences", "omit this step")
    choice = SequenceChoice.parse(sequences)
    conninfo, published, mapping = await find_publisher(name, target, connection, publications)
    return await set_target_sequences(conninfo, target, published, choice, mapping, unlogged=unlogged, force=force, dry_run=dry_run)


async def set_target_sequences(
    conninfo: str,
    target: str,
    published: Sequence[str],
    choice: SequenceChoice,
    mapping: TableMapping,
    *,
    unlogged: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> list[SequenceResult]:
    """See :func:`sync_sequences`. ``mapping`` has the names of the target's tables and sequences."""
    kind = required_ability(target, SequencesKind, "has no sequences", "omit this step")
    if not (published or choice.patterns or choice.kind == "all"):
        raise ConfigurationError("no sequences are chosen", hint="give the name of a subscription, --publication, or --sequences")
    async with await Session.connect(conninfo, application_name=_APPLICATION) as session:
        found = await read_sequences(session, published, _fitting(choice, target), unlogged=unlogged, mapping=mapping)
    results = [SequenceResult(sequence=each, state=SequenceState.LEFT, reason=_UNREADABLE) for each in found.unreadable]
    results += [SequenceResult(sequence=each, state=SequenceState.LEFT, reason=_UNNAMED) for each in found.unnamed]
    results += [SequenceResult(sequence=each, state=SequenceState.OMITTED) for each in found.omitted]
    results += await kind.set_sequences(target, found.sequences, force=force, dry_run=dry_run)
    return sorted(results, key=lambda result: result.sequence)


async def require_named(session: Session, publications: Sequence[str], sequences: Sequence[str]) -> None:
    """Find sequences that no option covers, before anything is done. The user must decide whether they are set.

    Raises:
        ConfigurationError: there are some, or no sequence has a name that was given.
        PublisherError: the publisher cannot be read, or a publication does not exist.
    """
    found = await read_sequences(session, publications, SequenceChoice.parse(sequences))
    if found.unnamed:
        raise ConfigurationError(
            f"no column of a published table uses these sequences: {shortened([str(each) for each in found.unnamed])}",
            hint="name those that are to be set with --sequences (SCHEMA.NAME, with * and ?), or leave them out with --sequences owned",
        )


async def default_sequences(connection: str, target: str, publications: Sequence[str]) -> tuple[str, ...]:
    """What the default stands for: ``all`` or ``owned``.

    Raises:
        PublisherError: the publisher cannot be read, or a publication does not exist.
    """
    kind = _fitting(SequenceChoice(), target).kind
    if kind is None:
        async with await Session.connect(connection, application_name=_APPLICATION) as session:
            kind = "all" if (await read_sequences(session, publications)).whole else "owned"
    return (kind,)


def _fitting(choice: SequenceChoice, target: str) -> SequenceChoice:
    """The default for a target that has counters of tables only: those of the tables."""
    return SequenceChoice("owned") if choice.kind is None and not is_postgres(target) else choice
