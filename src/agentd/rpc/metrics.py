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
from agentd.core.kernel.states import Kernel
from agentd.core.partition.split import Split
from agentd.core.slots import CPU, MEM, SlotName
from agentd.errors import InsufficientResource
from agentd.http.problem_responses import CREATE_CODES
from agentd.http.prometheus import counter, gauge, render_exposition
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
_MEASUREMENT_METRICS = {
    "utilization_percent": "Utilization of a device in percent",
    "memory_used_bytes": "Used memory of a device",
    "memory_total_bytes": "Total memory of a device",
    "temperature_c": "Temperature of a device in degrees Celsius",
    "power_w": "Power draw of a device in watts",
}


_USAGE_METRICS = {
    "cpu_seconds": (counter, "cpu_seconds", "Processor time used by a kernel"),
    "cpu_throttled_seconds": (counter, "cpu_throttled_seconds", "Time spent throttled"),
    "memory_bytes": (gauge, "memory_bytes", "Memory charged to a kernel"),
    "memory_peak_bytes": (gauge, "memory_peak_bytes", "Peak memory charged to a kernel"),
    "memory_limit_bytes": (gauge, "memory_limit_bytes", "Memory limit of a kernel"),
    "io_read_bytes": (counter, "io_read_bytes", "Bytes that a kernel read from disks"),
    "io_write_bytes": (counter, "io_write_bytes", "Bytes that a kernel wrote to disks"),
    "processes": (gauge, "processes", "Processes of a kernel"),
    "network_rx_bytes": (counter, "network_receive_bytes", "Bytes that a kernel received"),
    "network_tx_bytes": (counter, "network_transmit_bytes", "Bytes that a kernel sent"),
}
"""By member of `Usage`: the kind of metric, its name, and its help text."""


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
        info = {(self._node_id, __version__): 1}
        yield gauge("agentd_info", "The node and its daemon", ("node", "version"), info)
        text = "Generation of the inventory; rises with each change"
        yield gauge("agentd_inventory_generation", text, (), {(): self._devices.generation})
        text = "Number of warnings in GET /v1/node"
        yield gauge("agentd_warnings", text, (), {(): len(conditions)})
        subjects = {(item.condition.about,): 1 for item in conditions}
        yield gauge("agentd_condition", "A condition in GET /v1/node", ("about",), subjects)
        text = "Lines of the log that could not be written"
        yield counter("agentd_log_lines_lost", text, (), {(): LOST.total})
        available = {(n,): s.state is RuntimeState.AVAILABLE for n, s in state.runtimes.items()}
        yield gauge(
            "agentd_runtime_available", "Whether a runtime answers", ("runtime",), available
        )
        yield from _plugin_metrics(self._plugins)
        yield from _kernel_metrics(access.kernels(caller))
        creates = _results_by_agent(self._counts.creates, agents)
        text = "Creates by agent and result"
        yield counter("agentd_creates", text, ("agent", "result"), creates)
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
        text = "Processes that use a device which no kernel or claim holds"
        yield gauge("agentd_unclaimed_processes", text, _DEVICE, unclaimed)


def _plugin_metrics(plugins: Plugins) -> Iterator[Metric]:
    vitals, label = plugins.vitals(), ("plugin",)
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
    yield gauge("agentd_plugin_ready", "Whether a plugin is ready", label, ready)
    yield counter("agentd_plugin_restarts", "Restarts of a plugin", label, restarts)
    text = "Since a plugin last listed its devices"
    yield gauge("agentd_plugin_last_list_seconds", text, label, list_ages)


def _kernel_metrics(kernels: Iterable[Kernel]) -> Iterator[Metric]:
    counts = Counter((kernel.agent_id, kernel.state.value) for kernel in kernels)
    samples = dict(sorted(counts.items()))
    yield gauge("agentd_kernels", "Kernels by agent and state", ("agent", "state"), samples)


def _usage_metrics(usages: Sequence[KernelUse]) -> Iterator[Metric]:
    for member, (kind, name, text) in _USAGE_METRICS.items():
        values = {
            (usage.kernel_id, usage.agent_id): getattr(usage.usage, member) for usage in usages
        }
        samples = {labels: value for labels, value in values.items() if value is not None}
        yield kind(f"agentd_kernel_{name}", text, _KERNEL, samples)
    shares, memory = {}, {}
    for usage in usages:
        for device in usage.devices:
            labels = (usage.kernel_id, usage.agent_id, device.device_name, device.id)
            shares[labels] = float(device.share)
            if device.used_by_kernel_bytes is not None:
                memory[labels] = device.used_by_kernel_bytes
    labels_of_both = (*_KERNEL, *_DEVICE)
    text = "Share of a device held by a kernel"
    yield gauge("agentd_kernel_device_share", text, labels_of_both, shares)
    text = "Device memory used by a kernel"
    yield gauge("agentd_kernel_device_memory_bytes", text, labels_of_both, memory)


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
    text = "Claims by agent and kind of holder"
    yield gauge("agentd_claims", text, ("agent", "holder"), samples)
    results = _results_by_agent(counts.results, agents)
    text = "Claim requests by agent and result"
    yield counter("agentd_claims", text, ("agent", "result"), results)
    ends = {
        (reason.value,): sum(counts.ends.get((agent, reason), 0) for agent in agents)
        for reason in EndReason
    }
    yield counter("agentd_claim_ends", "Claims that ended, by reason", ("reason",), ends)


def _refusal_metrics(counts: NodeCounts, slots: Iterable[SlotName]) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    of_slots = InsufficientResource.code
    zero_keys = [(code, "") for code in CREATE_CODES - {of_slots}]
    zero_keys += [(of_slots, slot) for slot in slots]
    refusals = dict(sorted({**dict.fromkeys(zero_keys, 0), **counts.refusals}.items()))
    text = "Refused creates by error code and slot"
    yield counter("agentd_refusals", text, ("code", "slot"), refusals)
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
        text = f"{member.title()} of an agent's slot"
        yield gauge(f"agentd_slot_{member}", text, ("agent", "slot"), samples)


def _limit_metrics(state: NodeState, split: Split, agents: Iterable[str]) -> Iterator[Metric]:
    labels = ("agent", "device_name")
    limits = {
        (agent, name): limit
        for agent in agents
        for name, limit in rendering.limit_views(agent, split, state.ledger).items()
    }
    amounts = {key: float(limit["limit"]) for key, limit in limits.items()}
    held_amounts = {key: float(limit["held"]) for key, limit in limits.items()}
    guaranteed = {key: limit["guaranteed"] for key, limit in limits.items()}
    yield gauge("agentd_agent_limit", "Limit of an agent", labels, amounts)
    yield gauge("agentd_agent_limit_held", "Amount held under the limit", labels, held_amounts)
    text = "Whether the limit is guaranteed"
    yield gauge("agentd_agent_limit_guaranteed", text, labels, guaranteed)


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
    yield gauge("agentd_device_state", "1 for the state of the device", (*_DEVICE, "state"), states)
    for member in _AMOUNT_MEMBERS:
        sizes = {
            (*device_id, slot): float(use[member])  # type: ignore[literal-required]
            for device_id, view in views.items()
            for slot, use in view["slots"].items()
        }
        text = f"{member.title()} of a device"
        yield gauge(f"agentd_device_{member}", text, (*_DEVICE, "slot"), sizes)
    owners = {
        (*device_id, agent): 1
        for device_id, view in views.items()
        for agent in view["agents"]
        if agent in agents
    }
    text = "1 for each agent whose partition has the device"
    yield gauge("agentd_device_agent", text, (*_DEVICE, "agent"), owners)
    stable_ids = {name for device in accelerators for name in (device.stable_id, device.parent)}
    ids = {device.stable_id: device.device_id.id for device in accelerators}
    measurements = {
        (name, ids.get(item.stable_id, ""), item.stable_id): item
        for name, items in plugins.measurements().items()
        for item in items
        if item.stable_id in stable_ids
    }
    for member, text in _MEASUREMENT_METRICS.items():
        values = {labels: getattr(item, member) for labels, item in measurements.items()}
        samples = {labels: value for labels, value in values.items() if value is not None}
        yield gauge(f"agentd_device_{member}", text, (*_DEVICE, "stable_id"), samples)
