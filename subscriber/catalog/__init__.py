"""The catalog of subscriptions in a target: its tables, its logic over a few primitives, and the data that ``status`` shows."""

from subscriber.catalog.definition import Definition, claimed_elsewhere
from subscriber.catalog.interface import Catalog, MovableCatalog, OwnedCatalog, RestartingCatalog, ResyncingCatalog
from subscriber.catalog.observation import ApplierObservation, Observation, TableObservation

__all__ = [
    "ApplierObservation",
    "Catalog",
    "Definition",
    "MovableCatalog",
    "Observation",
    "OwnedCatalog",
    "RestartingCatalog",
    "ResyncingCatalog",
    "TableObservation",
    "claimed_elsewhere",
]
