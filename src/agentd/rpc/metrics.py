"""The node's metrics in the Prometheus exposition format, collected for each scrape."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from agentd import __version__
from agentd.core.access import Caller
from agentd.core.claim.claim import Claim, ClaimOwner, EndReason
from agentd.core.devices import Device
from agentd.core.kernel.states import Kernel
from agentd.core.partition.split import Split
from agentd.core.slots import CPU, MEM, SlotName
from agentd.errors import InsufficientResource
from agentd.http.problems import CREATE_CODES
from agentd.rpc import rendering
from agentd.services.access import Access
from agentd.services.claims.counts import ClaimCounts
from agentd.services.counts import CREATED, FAILED, REFUSED, NodeCounts
from agentd.services.devices import NodeDevices
from agentd.services.protocols import Plugins, PluginState
from agentd.services.state import NodeState, RuntimeState
from agentd.services.statistics import KernelUse, Statistics
from agentd.services.unclaimed import UnclaimedProcesses
from agentd.stderr import LOST

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MEASURED = {
    "utilization_percent": "Utilization of a device in percent",
    "memory_used_bytes": "Used memory of a device",
    "memory_total_bytes": "Total memory of a device",
    "temperature_c": "Temperature of a device in degrees Celsius",
    "power_w": "Power draw of a device in watts",
}


_USED = {
    "cpu_seconds": ("cpu_seconds", "Processor time used by a kernel", True),
    "cpu_throttled_seconds": ("cpu_throttled_seconds", "Time spent throttled", True),
    "memory_bytes": ("memory_bytes", "Memory charged to a kernel", False),
    "memory_peak_bytes": ("memory_peak_bytes", "Peak memory charged to a kernel", False),
    "memory_limit_bytes": ("memory_limit_bytes", "Memory limit of a kernel", False),
    "io_read_bytes": ("io_read_bytes", "Bytes that a kernel read from disks", True),
    "io_write_bytes": ("io_write_bytes", "Bytes that a kernel wrote to disks", True),
    "processes": ("processes", "Processes of a kernel", False),
    "network_rx_bytes": ("network_receive_bytes", "Bytes that a kernel received", True),
    "network_tx_bytes": ("network_transmit_bytes", "Bytes that a kernel sent", True),
}
"""By member of `Usage`: the metric, its help text, and whether it is a counter."""


class Metrics:
    """The metrics of one node."""

    def __init__(
        self,
        node_id: str,
        state: NodeState,
        devices: NodeDevices,
        plugins: Plugins,
        access: Access,
        statistics: Statistics,
        counts: NodeCounts,
        claim_counts: ClaimCounts,
        unclaimed: UnclaimedProcesses,
        *,
        is_per_kernel: bool,
    ) -> None:
        """Create the collector; `is_per_kernel` adds series for each kernel."""
        self._node_id = node_id
        self._state = state
        self._devices = devices
        self._plugins = plugins
        self._access = access
        self._statistics = statistics
        self._counts = counts
        self._claim_counts = claim_counts
        self._unclaimed = unclaimed
        self._is_per_kernel = is_per_kernel

    async def text(self, caller: Caller, warnings: int) -> bytes:
        """Return the metrics that a caller may see; `warnings` is the node's number of warnings."""
        from prometheus_client import CollectorRegistry, generate_latest

        kernels = self._access.kernels(caller) if self._is_per_kernel else []
        uses = await self._statistics.of(kernels)
        metrics = self

        class Node:
            def collect(self) -> Iterator[Metric]:
                return metrics._collected(caller, warnings)

        registry = CollectorRegistry(auto_describe=False)
        registry.register(Node())
        return generate_latest(registry) + await asyncio.to_thread(_used, uses)

    def _collected(self, caller: Caller, warnings: int) -> Iterator[Metric]:
        state, devices, plugins, access = self._state, self._devices, self._plugins, self._access
        yield from _node(self._node_id, warnings, state, devices, plugins)
        agents, seen = access.agents(caller), access.devices(caller)
        yield from _kernels(access.kernels(caller))
        yield _creates(self._counts, agents)
        yield from _claims(state.claims.values(), self._claim_counts, agents)
        if caller.agents is None:  # refusals reveal requests of other agents
            yield from _refusals(self._counts, devices.inventory.slot_types)
        yield from _slots(state, devices.split, agents)
        yield from _limits(state, devices.split, agents)
        yield from _devices(state, devices.split, plugins, seen, agents)
        yield _unclaimed(self._unclaimed, seen)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"agentd_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"agentd_{name}", text, labels=labels)


def _node(
    node_id: str, warned: int, state: NodeState, devices: NodeDevices, plugins: Plugins
) -> Iterator[Metric]:
    info = _gauge("info", "The node and its daemon", "node", "version")
    info.add_metric([node_id, __version__], 1)
    yield info
    generation = _gauge(
        "inventory_generation", "Generation of the inventory; rises with each change"
    )
    generation.add_metric([], devices.generation)
    yield generation
    warnings = _gauge("warnings", "Number of warnings in GET /v1/node")
    warnings.add_metric([], warned)
    yield warnings
    lost = _counter("log_lines_lost", "Lines of the log that could not be written")
    lost.add_metric([], LOST.total)
    yield lost
    runtimes = _gauge("runtime_available", "Whether a runtime answers", "runtime")
    for name, status in state.runtimes.items():
        runtimes.add_metric([name], status.state is RuntimeState.AVAILABLE)
    yield runtimes
    ready = _gauge("plugin_ready", "Whether a plugin is ready", "plugin")
    for plugin in plugins.statuses():
        if plugin.state is not PluginState.ABSENT:
            ready.add_metric([plugin.name], plugin.state is PluginState.READY)
    yield ready
    restarts = _counter("plugin_restarts", "Restarts of a plugin", "plugin")
    listed = _gauge("plugin_last_list_seconds", "Since a plugin last listed its devices", "plugin")
    for name, vitals in plugins.vitals().items():
        restarts.add_metric([name], vitals.restarts)
        if vitals.listed_s is not None:
            listed.add_metric([name], vitals.listed_s)
    yield from (restarts, listed)


def _kernels(shown: Iterable[Kernel]) -> Iterator[GaugeMetricFamily]:
    kernels = _gauge("kernels", "Kernels by agent and state", "agent", "state")
    counts = Counter((kernel.agent_id, kernel.state) for kernel in shown)
    for (agent, kernel_state), count in sorted(counts.items()):
        kernels.add_metric([agent, kernel_state.value], count)
    yield kernels


def _used(uses: Sequence[KernelUse]) -> bytes:
    """Return the series of kernels, formatted here: the library takes 100 ms for a thousand.

    Format: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    owners = [
        (use, f'kernel_id="{_escaped(use.kernel_id)}",agent_id="{_escaped(use.agent_id)}"')
        for use in uses
    ]
    lines: list[str] = []
    for member, (name, text, is_counter) in _USED.items():
        metric = f"agentd_kernel_{name}{'_total' if is_counter else ''}"
        lines += _head(metric, text, is_counter=is_counter)
        for use, labels in owners:
            if (value := getattr(use.usage, member)) is not None:
                lines.append(f"{metric}{{{labels}}} {value}")
    shares = _head("agentd_kernel_device_share", "Share of a device held by a kernel")
    memory = _head("agentd_kernel_device_memory_bytes", "Device memory used by a kernel")
    for use, labels in owners:
        for device in use.devices:
            where = f'device_name="{_escaped(device.device_name)}",id="{_escaped(device.id)}"'
            shares.append(f"agentd_kernel_device_share{{{labels},{where}}} {device.share:f}")
            if (used := device.used_by_kernel_bytes) is not None:
                memory.append(f"agentd_kernel_device_memory_bytes{{{labels},{where}}} {used}")
    return "".join(f"{line}\n" for line in (*lines, *shares, *memory)).encode()


def _head(metric: str, text: str, *, is_counter: bool = False) -> list[str]:
    kind = "counter" if is_counter else "gauge"
    return [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _creates(counts: NodeCounts, agents: Collection[str]) -> Metric:
    creates = _counter("creates", "Creates by agent and result", "agent", "result")
    for agent in agents:
        for result in (CREATED, REFUSED, FAILED):
            creates.add_metric([agent, result], counts.creates.get((agent, result), 0))
    return creates


def _claims(
    claims: Iterable[Claim], counts: ClaimCounts, agents: Collection[str]
) -> Iterator[Metric]:
    held = _gauge("claims", "Claims by agent and kind of holder", "agent", "holder")
    kinds = {kind: str(kind.__struct_config__.tag) for kind in get_args(ClaimOwner)}
    found = Counter((claim.agent_id, kinds[type(claim.holder)]) for claim in claims)
    results = _counter("claims", "Claim requests by agent and result", "agent", "result")
    for agent in agents:
        for kind in kinds.values():
            held.add_metric([agent, kind], found[agent, kind])
        for result in (CREATED, REFUSED, FAILED):
            results.add_metric([agent, result], counts.results.get((agent, result), 0))
    ends = _counter("claim_ends", "Claims that ended, by reason", "reason")
    for reason in EndReason:
        ends.add_metric([reason.value], sum(counts.ends.get((a, reason), 0) for a in agents))
    yield from (held, results, ends)


def _unclaimed(unclaimed: UnclaimedProcesses, seen: Iterable[Device]) -> Metric:
    text = "Processes that use a device which no kernel or claim holds"
    processes = _gauge("unclaimed_processes", text, "device_name", "id")
    ids = {device.device_id for device in seen}
    for device_id, pids in unclaimed.found.items():
        if device_id in ids:
            processes.add_metric([*device_id], len(pids))
    return processes


def _refusals(counts: NodeCounts, slots: Iterable[SlotName]) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    refusals = _counter("refusals", "Refused creates by error code and slot", "code", "slot")
    of_slots = InsufficientResource.code
    known = [(code, "") for code in CREATE_CODES - {of_slots}] + [
        (of_slots, slot) for slot in slots
    ]
    for reason, count in sorted({**dict.fromkeys(known, 0), **counts.refusals}.items()):
        refusals.add_metric(reason, count)
    yield refusals
    text = "Duration of creates: own until the runtime call, whole until the kernel ran"
    took = HistogramMetricFamily("agentd_create_seconds", text, labels=["share"])
    for share, histogram in (("own", counts.own), ("whole", counts.whole)):
        took.add_metric([share], list(histogram.cumulated()), histogram.sum_s)
    yield took


def _slots(state: NodeState, split: Split, agents: Iterable[str]) -> Iterator[GaugeMetricFamily]:
    ledger = state.ledger
    uses = {agent: rendering.agent_view(agent, split, ledger)["slots"] for agent in agents}
    for member in ("capacity", "allocated", "free"):
        gauge = _gauge(f"slot_{member}", f"{member.title()} of an agent's slot", "agent", "slot")
        for agent, slots in uses.items():
            for slot, use in slots.items():
                gauge.add_metric([agent, slot], float(use[member]))
        yield gauge


def _limits(state: NodeState, split: Split, agents: Iterable[str]) -> Iterator[GaugeMetricFamily]:
    labels = ("agent", "device_name")
    limits = _gauge("agent_limit", "Limit of an agent", *labels)
    held = _gauge("agent_limit_held", "Amount held under the limit", *labels)
    guaranteed = _gauge("agent_limit_guaranteed", "Whether the limit is guaranteed", *labels)
    for agent in agents:
        for name, limit in rendering.limit_views(agent, split, state.ledger).items():
            limits.add_metric([agent, name], float(limit["limit"]))
            held.add_metric([agent, name], float(limit["held"]))
            guaranteed.add_metric([agent, name], limit["guaranteed"])
    yield from (limits, held, guaranteed)


def _devices(
    state: NodeState,
    split: Split,
    plugins: Plugins,
    seen: Iterable[Device],
    agents: Collection[str],
) -> Iterator[GaugeMetricFamily]:
    ledger, labels = state.ledger, ("device_name", "id", "slot")
    states = _gauge("device_state", "1 for the state of the device", "device_name", "id", "state")
    accelerators = [d for d in seen if d.device_id.name not in (CPU, MEM)]
    known = {name for device in accelerators for name in (device.stable_id, device.parent)}
    sizes = {
        member: _gauge(f"device_{member}", f"{member.title()} of a device", *labels)
        for member in ("capacity", "allocated", "free")
    }
    owners = _gauge(
        "device_agent", "1 for each agent whose partition has the device", *labels[:2], "agent"
    )
    for device in accelerators:
        view = rendering.device_view(device, split, ledger)
        states.add_metric([*device.device_id, view["state"]], 1)
        for slot, use in view["slots"].items():
            for member, gauge in sizes.items():
                amount = float(use[member])  # type: ignore[literal-required]
                gauge.add_metric([*device.device_id, slot], amount)
        for agent in view["agents"]:
            if agent in agents:
                owners.add_metric([*device.device_id, agent], 1)
    yield from (states, *sizes.values(), owners)
    ids = {device.stable_id: device.device_id.id for device in accelerators}
    measured = [(name, item) for name, items in plugins.measurements().items() for item in items]
    for member, text in _MEASURED.items():
        gauge = _gauge(f"device_{member}", text, "device_name", "id", "stable_id")
        for name, item in measured:
            if item.stable_id in known and (value := getattr(item, member)) is not None:
                gauge.add_metric([name, ids.get(item.stable_id, ""), item.stable_id], value)
        yield gauge
