"""The compliance suite for sinks: scenarios that test the contract of :class:`subscriber.abc.Sink` on any sink.

Implement a :class:`ComplianceTarget` for your sink: it creates sinks and tables, and reads rows without the sink. Then, with pytest::

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
    async def test_compliance(scenario: Scenario) -> None:
        target = MyTarget()  # a new, empty one
        if lacking := scenario.lacking(target.new_sink().capabilities):
            pytest.skip(f"the sink does not declare {', '.join(lacking)}")
        await scenario.run(target)

The suite distinguishes sinks only by the abilities that they declare (:class:`subscriber.abc.Capabilities`).
"""

from subscriber.testing.compliance import (
    batches,
    changes,
    copying,
    failures,
    identities,
    parallel,
    positions,
    settings,
    tables,
    twophase,
    types,
    writers,
)
from subscriber.testing.compliance.registry import Scenario
from subscriber.testing.compliance.target import ComplianceTarget, Row, SettableTarget
from subscriber.testing.compliance.values import ColumnDefinition, Table, TypeName

__all__ = ["SCENARIOS", "ColumnDefinition", "ComplianceTarget", "Row", "Scenario", "SettableTarget", "Table", "TypeName"]

SCENARIOS: tuple[Scenario, ...] = tuple(
    scenario
    for topic in (changes, identities, batches, positions, failures, writers, tables, settings, copying, twophase, parallel, types)
    for scenario in topic.scenarios.found
)
"""All scenarios."""
