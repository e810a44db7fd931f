"""``sequences sync``: set the target's sequences to those of the publisher."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.abc.sequences import SequenceResult, SequenceState
from subscriber.catalog.target_kind import SequencesKind
from subscriber.errors import ConfigurationError
from subscriber.subscription.management.publisher import find_publisher
from subscriber.subscription.targets import required_ability
from subscriber.walreceiver.sequences import read_sequences
from subscriber.walreceiver.session import Session

__all__ = ["sync_sequences"]


async def sync_sequences(
    name: str | None = None,
    *,
    target: str,
    connection: str | None = None,
    publications: Sequence[str] = (),
    schemas: Sequence[str] = (),
    everything: bool = False,
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
        schemas: all sequences of these schemas, too.
        everything: all sequences of the publisher's database, without those of extensions.
        force: also set a sequence back that is ahead of the publisher.
        dry_run: change nothing.

    Returns:
        What was done about each sequence, or would be done. SQLAlchemy's targets have one result for each column.

    Raises:
        ConfigurationError: the publisher is not known, no sequence was chosen, a schema does not exist, or the target has no sequences.
        PublisherError: the publisher cannot be read, or a publication does not exist.
        TargetError: the subscription does not exist, or the target cannot be reached.
    """
    kind = required_ability(target, SequencesKind, "has no sequences", "omit this step")
    conninfo, published = await find_publisher(name, target, connection, publications)
    if not (published or schemas or everything):
        raise ConfigurationError("no sequences are chosen", hint="give the name of a subscription, --publication, --schema or --all")
    async with await Session.connect(conninfo, application_name="subscriber sequences") as session:
        sequences, unreadable = await read_sequences(session, published, schemas=schemas, everything=everything)
    reason = "the role may not read it on the publisher: GRANT SELECT ON SEQUENCE, and USAGE on its schema"
    results = [SequenceResult(sequence=each, state=SequenceState.LEFT, reason=reason) for each in unreadable]
    results += await kind.set_sequences(target, sequences, force=force, dry_run=dry_run)
    return sorted(results, key=lambda result: result.sequence)
