"""Metrics in the Prometheus exposition format, for the daemon and the gateway.

The library is imported with the first scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from prometheus_client import Metric

Labels = TypeVar("Labels", bound=tuple[str, ...])
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def gauge(name: str, text: str, labels: Sequence[str], samples: Mapping[Labels, float]) -> Metric:
    """Return a gauge; `samples` has its values by the values of its labels."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], samples: Mapping[Labels, float]) -> Metric:
    """Return a counter, as `gauge` does; its name is without `_total`."""
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def render_exposition(metrics: Iterable[Metric]) -> bytes:
    """Return metrics as text: 100 ms for 10,000 samples, so of many in a thread."""
    from prometheus_client import generate_latest
    from prometheus_client.registry import Collector

    class Collected(Collector):
        def collect(self) -> Iterable[Metric]:
            return metrics

    return generate_latest(Collected())
