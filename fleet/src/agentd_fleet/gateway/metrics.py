"""The fleet's metrics in the Prometheus exposition format, collected for each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentd.core.access import Caller
from agentd.core.slots import ONE, SlotKind
from agentd.errors import AgentdError
from agentd.http.problems import CREATE_CODES
from agentd.stderr import LOST
from agentd_fleet.view.fleet_view import FleetView

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PLACED = "placed"


class GatewayCounts:
    """Creates through this gateway by result; every possible result starts at zero."""

    def __init__(self) -> None:
        self.creates: Counter[str] = Counter(dict.fromkeys((PLACED, *sorted(CREATE_CODES)), 0))

    @contextmanager
    def create(self) -> Iterator[None]:
        """Count a create by its result: `placed`, or the code of the refusal."""
        try:
            yield
        except AgentdError as error:
            self.creates[error.code] += 1
            raise
        self.creates[PLACED] += 1


def exposition(view: FleetView, caller: Caller, counts: GatewayCounts, *, is_live: bool) -> bytes:
    """Return the fleet's metrics; amounts are in bytes and wholes, of the caller's agents only."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Fleet:
        def collect(self) -> Iterator[Metric]:
            yield from _fleet(view, counts, is_live=is_live)
            yield from _slots(view, caller)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fleet())
    return generate_latest(registry)


def _fleet(view: FleetView, counts: GatewayCounts, *, is_live: bool) -> Iterator[Metric]:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
    )

    live = GaugeMetricFamily("agentd_fleet_view_live", "Whether the view of nodes is current")
    live.add_metric([], is_live)
    nodes = GaugeMetricFamily("agentd_fleet_nodes", "Nodes by state", labels=["state"])
    states = Counter(view.state_of(node_id) for node_id in view.nodes)
    for state in ("ready", "daemon-down", "lost", "conflicting", "newer-schema"):
        nodes.add_metric([state], states[state])
    creates = CounterMetricFamily(
        "agentd_fleet_creates", "Creates through this gateway by result", labels=["result"]
    )
    for result, count in counts.creates.items():
        creates.add_metric([result], count)
    lost = CounterMetricFamily(
        "agentd_fleet_log_lines_lost", "Lines of the gateway's log that could not be written"
    )
    lost.add_metric([], LOST.total)
    yield from (live, nodes, creates, lost)


def _slots(view: FleetView, caller: Caller) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    uses = view.statistics(agents=caller.agents)
    for what in ("capacity", "allocated", "free"):
        family = GaugeMetricFamily(
            f"agentd_fleet_slot_{what}", f"Slots over the fleet: {what}", labels=["slot"]
        )
        for name, use in uses.items():
            unit = 1 if view.slot_types[name].kind is SlotKind.BYTES else ONE
            family.add_metric([name], getattr(use, what) / unit)
        yield family
