"""The fleet's metrics in the Prometheus exposition format, collected for each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentd.core.access import Caller
from agentd.core.slots import ONE, SlotKind
from agentd.error_codes import ERROR_CODES
from agentd.errors import AgentdError
from agentd.http.problem_responses import CREATE_CODES
from agentd.http.prometheus import counter, gauge
from agentd.stderr import LOST
from agentd_fleet.view.fleet_view import FleetView

if TYPE_CHECKING:
    from prometheus_client import Metric

PLACED, OTHER = "placed", "Other"
"""The results of creates that are no code of `ERROR_CODES`: a node may answer any code."""
USABLE = ("ready", "conflicting")
"""States of a node on which kernels can be created."""


class GatewayCounts:
    """Creates through this gateway by result; every possible result starts at zero."""

    def __init__(self) -> None:
        self.creates = Counter(dict.fromkeys((PLACED, OTHER, *sorted(CREATE_CODES)), 0))

    @contextmanager
    def create(self) -> Iterator[None]:
        """Count a create by its result: `placed`, or the code of the refusal."""
        try:
            yield
        except AgentdError as error:
            self.creates[error.code if error.code in ERROR_CODES else OTHER] += 1
            raise
        self.creates[PLACED] += 1


def fleet_metrics(
    view: FleetView, caller: Caller, counts: GatewayCounts, *, is_live: bool
) -> Iterator[Metric]:
    """Yield the fleet's metrics; amounts are in bytes and wholes, of the caller's agents only.

    The sums over many nodes take long, so they are computed in a thread.
    """
    text = "Whether the view of nodes is current"
    yield gauge("agentd_fleet_view_live", text, (), {(): is_live})
    count_by_state = Counter(view.node_state(node_id) for node_id in view.nodes)
    states = ("ready", "daemon-down", "lost", "conflicting", "newer-schema")
    nodes = {(state,): count_by_state[state] for state in states}
    yield gauge("agentd_fleet_nodes", "Nodes by state", ("state",), nodes)
    usable = {
        (node.node_id,): view.node_state(node.node_id) in USABLE and not node.unusable_reason
        for node in view.nodes.values()
        if caller.agents is None or not caller.agents.isdisjoint(node.offers)
    }
    text = "Whether kernels can be created on a node"
    yield gauge("agentd_fleet_node_usable", text, ("node_id",), usable)
    creates = {(result,): count for result, count in dict(counts.creates).items()}
    text = "Creates through this gateway by result"
    yield counter("agentd_fleet_creates", text, ("result",), creates)
    text = "Lines of the gateway's log that could not be written"
    yield counter("agentd_fleet_log_lines_lost", text, (), {(): LOST.total})
    usages = view.statistics(agents=caller.agents)
    units = {name: 1 if view.slot_types[name].kind is SlotKind.BYTES else ONE for name in usages}
    for member in ("capacity", "allocated", "free"):
        amounts = {(name,): getattr(usage, member) / units[name] for name, usage in usages.items()}
        text = f"Slots over the fleet: {member}"
        yield gauge(f"agentd_fleet_slot_{member}", text, ("slot",), amounts)
