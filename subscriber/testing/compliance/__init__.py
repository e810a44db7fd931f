"""The compliance suite for sinks: scenarios that test the contract of :class:`subscriber.interfaces.Sink` on any sink.

Implement a :class:`ComplianceTarget` for your sink: it creates sinks and tables, and reads rows without the sink. Then, with pytest::

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
    async def test_compliance(scenario: Scenario) -> None:
        await scenario.run(MyTarget())  # a new, empty one

The suite distinguishes sinks only by the abilities that they implement (:mod:`subscriber.interfaces.abilities`), and targets by their
:class:`Traits`.
"""

from subscriber.testing.compliance.sample_messages import ColumnDefinition, Table, TypeName
from subscriber.testing.compliance.scenarios import Scenario
from subscriber.testing.compliance.suite import SCENARIOS
from subscriber.testing.compliance.target import ComplianceTarget, Row, SettableTarget, Traits, WorkersTarget

__all__ = [
    "SCENARIOS",
    "ColumnDefinition",
    "ComplianceTarget",
    "Row",
    "Scenario",
    "SettableTarget",
    "Table",
    "Traits",
    "TypeName",
    "WorkersTarget",
]
