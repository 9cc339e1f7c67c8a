"""What `name[]` in a scrape's query asks for: some of the metrics."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

__all__ = ["NamedFamilies"]


class NamedFamilies(CollectorRegistry):
    """A registry whose families are found by name although its collectors do not tell them in advance."""

    def restricted_registry(self, names: Iterable[str]) -> "Restricted":  # type: ignore[override]
        """The families that have one of these names, or a sample of such a name; what there is not is left out."""
        return Restricted(self, frozenset(names))


class Restricted(Collector):
    """Whole families: a histogram is asked for by its own name, and one of its buckets says nothing alone."""

    def __init__(self, all_families: Collector, names: frozenset[str]) -> None:
        self._all_families, self._names = all_families, names

    def collect(self) -> Iterator[Metric]:
        """The families, in their order."""
        for family in self._all_families.collect():
            if not self._names.isdisjoint(_names_of(family)):
                yield family


def _names_of(family: Metric) -> Iterator[str]:
    yield family.name
    if family.type == "counter":  # it may have no sample yet
        yield f"{family.name}_total"
    for sample in family.samples:
        yield sample.name
