"""``migrate``: everything from an empty target to the moment before the cutover."""

from subscriber.subscription.migration.migration import Migration

__all__ = ["Migration"]
