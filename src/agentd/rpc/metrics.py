"""The node in the Prometheus exposition format, made when it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from agentd import __version__
from agentd.core.access import Caller
from agentd.core.devices import Device
from agentd.core.kernel import Kernel
from agentd.core.partition import Split
from agentd.core.slots import CPU, MEM
from agentd.rpc import rendering
from agentd.services.access import Access
from agentd.services.devices import NodeDevices
from agentd.services.interfaces import Plugins, PluginState
from agentd.services.state import NodeState, RuntimeState

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MEASURED = {
    "utilization_percent": "How busy a device is",
    "memory_used_bytes": "Memory of a device in use",
    "memory_total_bytes": "Memory of a device",
    "temperature_c": "Temperature of a device in degrees Celsius",
    "power_w": "Power that a device draws in watts",
}


def exposition(
    node_id: str,
    caller: Caller,
    warnings: int,
    state: NodeState,
    devices: NodeDevices,
    plugins: Plugins,
    access: Access,
) -> bytes:
    """Return all metrics of the node that a caller can see as text."""
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - 5 MiB

    class Node:
        def collect(self) -> Iterator[GaugeMetricFamily]:
            yield from _node(node_id, warnings, state, devices, plugins)
            agents, seen = access.agents(caller), access.devices(caller)
            yield from _kernels(access.kernels(caller))
            yield from _slots(state, devices.split, agents)
            yield from _limits(state, devices.split, agents)
            yield from _devices(state, devices.split, plugins, seen)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Node())
    return generate_latest(registry)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - see above

    return GaugeMetricFamily(f"agentd_{name}", text, labels=labels)


def _node(
    node_id: str, warned: int, state: NodeState, devices: NodeDevices, plugins: Plugins
) -> Iterator[GaugeMetricFamily]:
    info = _gauge("info", "The node and its daemon", "node", "version")
    info.add_metric([node_id, __version__], 1)
    yield info
    generation = _gauge("inventory_generation", "Rises with each change of the devices")
    generation.add_metric([], devices.generation)
    yield generation
    warnings = _gauge("warnings", "What GET /v1/node warns of")
    warnings.add_metric([], warned)
    yield warnings
    runtimes = _gauge("runtime_available", "Whether a runtime answers", "runtime")
    for name, status in state.runtimes.items():
        runtimes.add_metric([name], status.state is RuntimeState.AVAILABLE)
    yield runtimes
    ready = _gauge("plugin_ready", "Whether a plugin is ready", "plugin")
    for plugin in plugins.statuses():
        ready.add_metric([plugin.name], plugin.state is PluginState.READY)
    yield ready


def _kernels(shown: Iterable[Kernel]) -> Iterator[GaugeMetricFamily]:
    kernels = _gauge("kernels", "Kernels by agent and state", "agent", "state")
    counts = Counter((kernel.agent_id, kernel.state) for kernel in shown)
    for (agent, kernel_state), count in sorted(counts.items()):
        kernels.add_metric([agent, kernel_state.value], count)
    yield kernels


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
    limits = _gauge("agent_limit", "The most that an agent may hold", *labels)
    held = _gauge("agent_limit_held", "What it holds of that", *labels)
    guaranteed = _gauge("agent_limit_guaranteed", "Whether nobody can keep it from that", *labels)
    for agent in agents:
        for name, limit in rendering.limit_views(agent, split, state.ledger).items():
            limits.add_metric([agent, name], float(limit["limit"]))
            held.add_metric([agent, name], float(limit["held"]))
            guaranteed.add_metric([agent, name], limit["guaranteed"])
    yield from (limits, held, guaranteed)


def _devices(
    state: NodeState, split: Split, plugins: Plugins, seen: Iterable[Device]
) -> Iterator[GaugeMetricFamily]:
    ledger = state.ledger
    states = _gauge("device_state", "1 for the state a device is in", "device_name", "id", "state")
    accelerators = [d for d in seen if d.device_id.name not in (CPU, MEM)]
    known = {name for device in accelerators for name in (device.stable_id, device.parent)}
    for device in accelerators:
        shown = rendering.device_view(device, split, ledger)["state"]
        states.add_metric([*device.device_id, shown], 1)
    yield states
    ids = {device.stable_id: device.device_id.id for device in accelerators}
    measured = [(name, item) for name, items in plugins.measurements().items() for item in items]
    for member, text in _MEASURED.items():
        gauge = _gauge(f"device_{member}", text, "device_name", "id", "stable_id")
        for name, item in measured:
            if item.stable_id in known and (value := getattr(item, member)) is not None:
                gauge.add_metric([name, ids.get(item.stable_id, ""), item.stable_id], value)
        yield gauge
