"""The compliance suite for sinks: what :class:`subscriber.abc.Sink` promises, as scenarios that run over any of them.

Write a :class:`ComplianceTarget` for yours: it makes a sink, makes tables, and reads rows back without the sink. Then, with pytest::

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
    async def test_compliance(scenario: Scenario) -> None:
        target = MyTarget()  # an empty one
        if lacking := scenario.lacking(target.new_sink().capabilities):
            pytest.skip(f"the sink does not declare {', '.join(lacking)}")
        await scenario.run(target)

Sinks differ by what they declare (:class:`subscriber.abc.Capabilities`) and by nothing else: no scenario asks which one it is.
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
"""All of them."""
