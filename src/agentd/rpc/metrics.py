"""The node's metrics in the Prometheus exposition format, collected for each scrape."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from agentd import __version__
from agentd.core.access import Caller
from agentd.core.claim.claim import Claim, ClaimHolder, EndReason
from agentd.core.conditions import ActiveCondition
from agentd.core.devices import Device
from agentd.core.partition.split import Split
from agentd.core.slots import CPU, MEM, SlotName
from agentd.errors import InsufficientResource
from agentd.http.problem_responses import CREATE_CODES
from agentd.http.prometheus import Labels, counter, gauge, render_exposition
from agentd.rpc import rendering
from agentd.services.access import Access
from agentd.services.claims.counts import ClaimCounts
from agentd.services.counts import CREATED, FAILED, REFUSED, NodeCounts
from agentd.services.node import Node
from agentd.services.protocols import Plugins, PluginState
from agentd.services.state import NodeState, RuntimeState
from agentd.services.statistics import KernelUse, Statistics
from agentd.services.unclaimed import UnclaimedProcesses
from agentd.stderr import LOST

if TYPE_CHECKING:
    from prometheus_client import Metric

_DEVICE = ("device_name", "id")
_KERNEL = ("kernel_id", "agent_id")
_AMOUNT_MEMBERS = ("capacity", "allocated", "free")
_MEASUREMENTS = (
    *("utilization_percent", "memory_used_bytes", "memory_total_bytes", "temperature_c", "power_w"),
)
_USAGE_METRICS = {
    "cpu_seconds": "cpu_seconds_total",
    "cpu_throttled_seconds": "cpu_throttled_seconds_total",
    "memory_bytes": "memory_bytes",
    "memory_peak_bytes": "memory_peak_bytes",
    "memory_limit_bytes": "memory_limit_bytes",
    "io_read_bytes": "io_read_bytes_total",
    "io_write_bytes": "io_write_bytes_total",
    "processes": "processes",
    "network_rx_bytes": "network_receive_bytes_total",
    "network_tx_bytes": "network_transmit_bytes_total",
}
"""The name of a kernel's metric by member of `Usage`."""
_METRICS: Mapping[str, tuple[Sequence[str], str]] = {
    "info": (("node", "version"), "The node and its daemon"),
    "inventory_generation": ((), "Generation of the inventory; rises with each change"),
    "warnings": ((), "Number of warnings in GET /v1/node"),
    "condition": (("about",), "A condition in GET /v1/node"),
    "log_lines_lost_total": ((), "Lines of the log that could not be written"),
    "runtime_available": (("runtime",), "Whether a runtime answers"),
    "plugin_ready": (("plugin",), "Whether a plugin is ready"),
    "plugin_restarts_total": (("plugin",), "Restarts of a plugin"),
    "plugin_last_list_seconds": (("plugin",), "Since a plugin last listed its devices"),
    "kernels": (("agent", "state"), "Kernels by agent and state"),
    "kernel_cpu_seconds_total": (_KERNEL, "Processor time used by a kernel"),
    "kernel_cpu_throttled_seconds_total": (_KERNEL, "Time spent throttled"),
    "kernel_memory_bytes": (_KERNEL, "Memory charged to a kernel"),
    "kernel_memory_peak_bytes": (_KERNEL, "Peak memory charged to a kernel"),
    "kernel_memory_limit_bytes": (_KERNEL, "Memory limit of a kernel"),
    "kernel_io_read_bytes_total": (_KERNEL, "Bytes that a kernel read from disks"),
    "kernel_io_write_bytes_total": (_KERNEL, "Bytes that a kernel wrote to disks"),
    "kernel_processes": (_KERNEL, "Processes of a kernel"),
    "kernel_network_receive_bytes_total": (_KERNEL, "Bytes that a kernel received"),
    "kernel_network_transmit_bytes_total": (_KERNEL, "Bytes that a kernel sent"),
    "kernel_device_share": ((*_KERNEL, *_DEVICE), "Share of a device held by a kernel"),
    "kernel_device_memory_bytes": ((*_KERNEL, *_DEVICE), "Device memory used by a kernel"),
    "creates_total": (("agent", "result"), "Creates by agent and result"),
    "refusals_total": (("code", "slot"), "Refused creates by error code and slot"),
    "claims": (("agent", "holder"), "Claims by agent and kind of holder"),
    "claims_total": (("agent", "result"), "Claim requests by agent and result"),
    "claim_ends_total": (("reason",), "Claims that ended, by reason"),
    "slot_capacity": (("agent", "slot"), "Capacity of an agent's slot"),
    "slot_allocated": (("agent", "slot"), "Allocated of an agent's slot"),
    "slot_free": (("agent", "slot"), "Free of an agent's slot"),
    "agent_limit": (("agent", "device_name"), "Limit of an agent"),
    "agent_limit_held": (("agent", "device_name"), "Amount held under the limit"),
    "agent_limit_guaranteed": (("agent", "device_name"), "Whether the limit is guaranteed"),
    "device_state": ((*_DEVICE, "state"), "1 for the state of the device"),
    "device_capacity": ((*_DEVICE, "slot"), "Capacity of a device"),
    "device_allocated": ((*_DEVICE, "slot"), "Allocated of a device"),
    "device_free": ((*_DEVICE, "slot"), "Free of a device"),
    "device_agent": ((*_DEVICE, "agent"), "1 for each agent whose partition has the device"),
    "device_utilization_percent": ((*_DEVICE, "stable_id"), "Utilization of a device in percent"),
    "device_memory_used_bytes": ((*_DEVICE, "stable_id"), "Used memory of a device"),
    "device_memory_total_bytes": ((*_DEVICE, "stable_id"), "Total memory of a device"),
    "device_temperature_c": (
        (*_DEVICE, "stable_id"),
        "Temperature of a device in degrees Celsius",
    ),
    "device_power_w": ((*_DEVICE, "stable_id"), "Power draw of a device in watts"),
    "unclaimed_processes": (
        _DEVICE,
        "Processes that use a device which no kernel or claim holds",
    ),
}
"""Labels and help text by name without `agentd_`; a counter ends with `_total`, others are gauges.

The histogram of durations is apart, see `_refusal_metrics`.
"""


def _metric(name: str, samples: Mapping[Labels, float]) -> Metric:
    """Return a metric of the table; `samples` has its values by the values of its labels."""
    labels, text = _METRICS[name]
    kind = counter if name.endswith("_total") else gauge
    return kind(f"agentd_{name}", text, labels, samples)


class Metrics:
    """The metrics of one node."""

    def __init__(
        self,
        node_id: str,
        node: Node,
        plugins: Plugins,
        access: Access,
        statistics: Statistics,
        unclaimed: UnclaimedProcesses,
        *,
        is_per_kernel: bool,
    ) -> None:
        """Create the collector; `is_per_kernel` adds series for each kernel."""
        self._node_id = node_id
        self._state, self._devices = node.state, node.devices
        self._plugins = plugins
        self._access = access
        self._statistics = statistics
        self._counts, self._claim_counts = node.counts, node.claim_counts
        self._unclaimed = unclaimed
        self._is_per_kernel = is_per_kernel

    async def render(self, caller: Caller, conditions: Sequence[ActiveCondition]) -> bytes:
        """Return the metrics that a caller may see, such as these conditions."""
        kernels = self._access.kernels(caller) if self._is_per_kernel else []
        usages = await self._statistics.read(kernels)
        metrics = [*self._collect(caller, conditions)]
        return await asyncio.to_thread(
            lambda: render_exposition([*metrics, *_usage_metrics(usages)])
        )

    def _collect(self, caller: Caller, conditions: Sequence[ActiveCondition]) -> Iterator[Metric]:
        state, split, access = self._state, self._devices.split, self._access
        agents, visible = access.agents(caller), access.devices(caller)
        yield _metric("info", {(self._node_id, __version__): 1})
        yield _metric("inventory_generation", {(): self._devices.generation})
        yield _metric("warnings", {(): len(conditions)})
        yield _metric("condition", {(item.condition.about,): 1 for item in conditions})
        yield _metric("log_lines_lost_total", {(): LOST.total})
        available = {(n,): s.state is RuntimeState.AVAILABLE for n, s in state.runtimes.items()}
        yield _metric("runtime_available", available)
        yield from _plugin_metrics(self._plugins)
        kernels = Counter(
            (kernel.agent_id, kernel.state.value) for kernel in access.kernels(caller)
        )
        yield _metric("kernels", dict(sorted(kernels.items())))
        yield _metric("creates_total", _results_by_agent(self._counts.creates, agents))
        yield from _claim_metrics(state.claims.values(), self._claim_counts, agents)
        if caller.agents is None:  # refusals reveal requests of other agents
            yield from _refusal_metrics(self._counts, self._devices.inventory.slot_types)
        yield from _slot_metrics(state, split, agents)
        yield from _limit_metrics(state, split, agents)
        yield from _device_metrics(state, split, self._plugins, visible, agents)
        ids = {device.device_id for device in visible}
        unclaimed = {
            (*i,): len(pids) for i, pids in self._unclaimed.pids_by_device.items() if i in ids
        }
        yield _metric("unclaimed_processes", unclaimed)


def _plugin_metrics(plugins: Plugins) -> Iterator[Metric]:
    vitals = plugins.vitals()
    ready = {
        (plugin.name,): plugin.state is PluginState.READY
        for plugin in plugins.statuses()
        if plugin.state is not PluginState.ABSENT
    }
    restarts = {(name,): status.restarts for name, status in vitals.items()}
    list_ages = {
        (n,): status.listing_age_s
        for n, status in vitals.items()
        if status.listing_age_s is not None
    }
    yield _metric("plugin_ready", ready)
    yield _metric("plugin_restarts_total", restarts)
    yield _metric("plugin_last_list_seconds", list_ages)


def _usage_metrics(usages: Sequence[KernelUse]) -> Iterator[Metric]:
    for member, name in _USAGE_METRICS.items():
        values = {
            (usage.kernel_id, usage.agent_id): getattr(usage.usage, member) for usage in usages
        }
        samples = {labels: value for labels, value in values.items() if value is not None}
        yield _metric(f"kernel_{name}", samples)
    shares, memory = {}, {}
    for usage in usages:
        for device in usage.devices:
            labels = (usage.kernel_id, usage.agent_id, device.device_name, device.id)
            shares[labels] = float(device.share)
            if device.used_by_kernel_bytes is not None:
                memory[labels] = device.used_by_kernel_bytes
    yield _metric("kernel_device_share", shares)
    yield _metric("kernel_device_memory_bytes", memory)


def _results_by_agent(
    counts: Mapping[tuple[str, str], int], agents: Iterable[str]
) -> dict[tuple[str, str], int]:
    """Return the counts of requests by agent and result, zero by default."""
    results = (CREATED, REFUSED, FAILED)
    return {(agent, kind): counts.get((agent, kind), 0) for agent in agents for kind in results}


def _claim_metrics(
    claims: Iterable[Claim], counts: ClaimCounts, agents: Collection[str]
) -> Iterator[Metric]:
    kinds = {kind: str(kind.__struct_config__.tag) for kind in get_args(ClaimHolder)}
    counts_by_kind = Counter((claim.agent_id, kinds[type(claim.holder)]) for claim in claims)
    samples = {
        (agent, kind): counts_by_kind[agent, kind] for agent in agents for kind in kinds.values()
    }
    yield _metric("claims", samples)
    yield _metric("claims_total", _results_by_agent(counts.results, agents))
    ends = {
        (reason.value,): sum(counts.ends.get((agent, reason), 0) for agent in agents)
        for reason in EndReason
    }
    yield _metric("claim_ends_total", ends)


def _refusal_metrics(counts: NodeCounts, slots: Iterable[SlotName]) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    of_slots = InsufficientResource.code
    zero_keys = [(code, "") for code in CREATE_CODES - {of_slots}]
    zero_keys += [(of_slots, slot) for slot in slots]
    refusals = dict(sorted({**dict.fromkeys(zero_keys, 0), **counts.refusals}.items()))
    yield _metric("refusals_total", refusals)
    text = "Duration of creates: own until the runtime call, whole until the kernel ran"
    durations = HistogramMetricFamily("agentd_create_seconds", text, labels=["share"])
    for share, histogram in counts.durations.items():
        durations.add_metric([share], *histogram.cumulated())
    yield durations


def _slot_metrics(state: NodeState, split: Split, agents: Iterable[str]) -> Iterator[Metric]:
    slots_by_agent = {
        agent: rendering.agent_view(agent, split, state.ledger)["slots"] for agent in agents
    }
    for member in _AMOUNT_MEMBERS:
        samples = {
            (agent, slot): float(use[member])  # type: ignore[literal-required]
            for agent, slots in slots_by_agent.items()
            for slot, use in slots.items()
        }
        yield _metric(f"slot_{member}", samples)


def _limit_metrics(state: NodeState, split: Split, agents: Iterable[str]) -> Iterator[Metric]:
    limits = {
        (agent, name): limit
        for agent in agents
        for name, limit in rendering.limit_views(agent, split, state.ledger).items()
    }
    amounts = {key: float(limit["limit"]) for key, limit in limits.items()}
    held_amounts = {key: float(limit["held"]) for key, limit in limits.items()}
    guaranteed = {key: limit["guaranteed"] for key, limit in limits.items()}
    yield _metric("agent_limit", amounts)
    yield _metric("agent_limit_held", held_amounts)
    yield _metric("agent_limit_guaranteed", guaranteed)


def _device_metrics(
    state: NodeState,
    split: Split,
    plugins: Plugins,
    visible: Iterable[Device],
    agents: Collection[str],
) -> Iterator[Metric]:
    accelerators = [device for device in visible if device.device_id.name not in (CPU, MEM)]
    views = {
        device.device_id: rendering.device_view(device, split, state.ledger)
        for device in accelerators
    }
    states = {(*device_id, view["state"]): 1 for device_id, view in views.items()}
    yield _metric("device_state", states)
    for member in _AMOUNT_MEMBERS:
        sizes = {
            (*device_id, slot): float(use[member])  # type: ignore[literal-required]
            for device_id, view in views.items()
            for slot, use in view["slots"].items()
        }
        yield _metric(f"device_{member}", sizes)
    owners = {
        (*device_id, agent): 1
        for device_id, view in views.items()
        for agent in view["agents"]
        if agent in agents
    }
    yield _metric("device_agent", owners)
    stable_ids = {name for device in accelerators for name in (device.stable_id, device.parent)}
    ids = {device.stable_id: device.device_id.id for device in accelerators}
    measurements = {
        (name, ids.get(item.stable_id, ""), item.stable_id): item
        for name, items in plugins.measurements().items()
        for item in items
        if item.stable_id in stable_ids
    }
    for member in _MEASUREMENTS:
        values = {labels: getattr(item, member) for labels, item in measurements.items()}
        samples = {labels: value for labels, value in values.items() if value is not None}
        yield _metric(f"device_{member}", samples)
