"""The catalog of subscriptions that a target keeps: its tables, its logic over small primitives, and what others see of it."""

from subscriber.catalog.definition import Definition, claimed_elsewhere
from subscriber.catalog.interface import Catalog, OwnedCatalog
from subscriber.catalog.observation import ApplierObservation, Observation, TableObservation

__all__ = ["ApplierObservation", "Catalog", "Definition", "Observation", "OwnedCatalog", "TableObservation", "claimed_elsewhere"]
