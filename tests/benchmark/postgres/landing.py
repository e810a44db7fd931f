"""Landing in a lake, beside ``pg_recvlogical``. The target is a directory, and no applier runs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from subscriber.sinks.spark.catalog.lake import LANDING
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import read_manifests
from subscriber.testing.server import EmbeddedServer
from tests.benchmark.postgres.contenders import Ours
from tests.benchmark.postgres.processes import tree_cpu
from tests.benchmark.postgres.servers import END, SETTINGS, Bed
from tests.benchmark.postgres.workloads import Stream

__all__ = ["LakeBed", "Landing", "lake_bed"]


class LakeBed(Bed):
    """A publisher and a directory of lakes. Each run begins with a copy of the template.

    Args:
        publisher: the server.
        directory: for the lakes.
    """

    def __init__(self, publisher: EmbeddedServer, directory: Path) -> None:
        super().__init__(publisher, publisher)
        self._directory = directory
        self._before: Counter[str] = Counter()

    @property
    def template_dsn(self) -> str:
        return f"spark://{self._directory / 'template'}"

    @property
    def lake(self) -> Path:
        """The lake of the run."""
        return self._directory / "run"

    @contextlib.contextmanager
    def fresh_target(self) -> Iterator[None]:
        shutil.copytree(self._directory / "template", self.lake)
        try:
            yield
        finally:
            shutil.rmtree(self.lake)

    @contextlib.contextmanager
    def workload(self) -> Iterator[None]:
        with super().workload():
            yield
        shutil.rmtree(self._directory / "template")

    def write(self, stream: Stream, size: int) -> None:
        self._before = self._counts()
        super().write(stream, size)

    def _counts(self) -> Counter[str]:
        names = self.publisher.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        return Counter({name: int(self.publisher.value(f"SELECT count(*) FROM {name}")) for (name,) in names})

    def manifests(self) -> list[Path]:
        """Those that are landed, in order."""
        return sorted((self.lake / "landing").glob("*.json"))

    def check_rows(self) -> None:
        """Compare how many rows were landed with how many the publisher's tables got and lost."""
        counts = self._before.copy()
        for manifest in read_manifests(Storage.open(Location.parse(f"spark://{self.lake}")), LANDING):
            for file in manifest.files:
                ops, moved = pq.read_table(self.lake / file.path, columns=["_op", "_moved"]).columns
                found = Counter(ops.to_pylist())
                # an UPDATE that moves a row is landed as its removal and its new form
                counts[file.schema.table.name] += found["i"] - found["d"] + sum(moved.to_pylist())
        expected = self._counts()
        assert counts == expected, (counts, expected)


class Landing(Ours):
    """``subscriber run`` into a lake."""

    def prepare(self) -> None:
        """A copied lake is the same lake."""

    def command(self) -> list[str]:
        assert isinstance(self.bed, LakeBed)
        return self.arguments(f"spark://{self.bed.lake}")

    def ended(self) -> bool:
        assert isinstance(self.bed, LakeBed)
        found = self.bed.manifests()
        return bool(found) and f'"{END}"' in found[-1].read_text()

    def cpu(self) -> tuple[float, float]:
        return tree_cpu(self.process.pid), 0.0


@contextlib.contextmanager
def lake_bed(version: int) -> Iterator[LakeBed]:
    """A publisher of a major version, and a directory."""
    with EmbeddedServer.create(version, settings=SETTINGS) as publisher, tempfile.TemporaryDirectory(prefix="bench-") as directory:
        place = LakeBed(publisher, Path(directory))
        yield place
        place.close()
