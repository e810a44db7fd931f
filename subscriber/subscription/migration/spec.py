"""What a migration is asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from subscriber.catalog import Observation
from subscriber.config import Settings, SubscriptionOptions
from subscriber.subscription.management.schema import SchemaOptions
from subscriber.subscription.targets import observed
from subscriber.walreceiver.new_publication import TableChoice
from subscriber.walreceiver.session import Session

__all__ = ["APPLICATION", "MigrationSpec", "Tell"]

APPLICATION: Final = "subscriber migrate"
Tell = Callable[[str], None]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSpec:
    """What does not change while a migration runs. The attributes are described at :class:`subscriber.Migration`."""

    name: str
    connection: str
    target: str
    publication: str
    choice: TableChoice
    options: SubscriptionOptions
    settings: Settings
    schema: SchemaOptions
    sequences: Sequence[str] = ()

    async def publisher(self) -> Session:
        """Open a session with the publisher."""
        return await Session.connect(self.connection, application_name=APPLICATION)

    async def observed(self) -> Observation | None:
        """The subscription in the target's catalog; None: there is none, or it was not made completely."""
        found = await observed(self.target, self.name)
        return found if found is not None and found.definition.made else None

    async def defined(self, verb: Callable[..., Awaitable[_Result]]) -> _Result:
        """Call a verb with what defines the subscription."""
        return await verb(
            self.name,
            connection=self.connection,
            publications=[self.publication],
            target=self.target,
            options=self.options,
            settings=self.settings,
        )
