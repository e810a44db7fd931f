"""The scenarios of the compliance suite, with one module for each topic."""

from subscriber.testing.compliance.scenarios import Scenario
from subscriber.testing.compliance.suite import (
    batches,
    column_types,
    identities,
    parallel_apply,
    positions,
    prepared_transactions,
    rejected_changes,
    row_changes,
    synchronized_tables,
    table_states,
    user_settings,
    writers,
)

__all__ = ["SCENARIOS"]

SCENARIOS: tuple[Scenario, ...] = tuple(
    scenario
    for topic in (
        row_changes,
        identities,
        batches,
        positions,
        rejected_changes,
        writers,
        table_states,
        user_settings,
        synchronized_tables,
        prepared_transactions,
        parallel_apply,
        column_types,
    )
    for scenario in topic.scenarios.found
)
"""All scenarios."""
