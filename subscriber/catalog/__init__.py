"""The catalog of subscriptions in a target: its tables, its logic over a few primitives, and the data that ``status`` shows."""

from subscriber.catalog.definition import Definition, claimed_elsewhere
from subscriber.catalog.interface import Catalog, CopyingCatalog, MovableCatalog, OwnedCatalog
from subscriber.catalog.observation import ApplierObservation, Observation, TableObservation

__all__ = [
    "ApplierObservation",
    "Catalog",
    "CopyingCatalog",
    "Definition",
    "MovableCatalog",
    "Observation",
    "OwnedCatalog",
    "TableObservation",
    "claimed_elsewhere",
]
