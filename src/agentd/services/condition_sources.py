"""The conditions of runtimes, devices, kernels, claims, agents and engines."""

from __future__ import annotations

from collections.abc import Iterator

from agentd.core.allocation.ledger import holder_text
from agentd.core.conditions import Condition
from agentd.core.groups import group
from agentd.core.kernel.states import LIVE
from agentd.services.engines import AwaitedEngines
from agentd.services.node import Node
from agentd.services.protocols import Runtime
from agentd.services.state import NodeState, RuntimeState


def runtime_conditions(state: NodeState) -> Iterator[Condition]:
    """Yield the runtimes that create no kernels, and what they list that cannot be a kernel."""
    for name, status in state.runtimes.items():
        about = f"runtime/{name}"
        if status.state is RuntimeState.UNAVAILABLE:
            remedy = f"if it is gone for good: agentctl runtimes forget {name}"
            yield Condition(about, f"runtime {name} is unavailable: {status.reason}", remedy)
        elif status.reason:
            yield Condition(about, f"runtime {name} creates no kernels: {status.reason}")
        for reason in status.ignored:
            yield Condition(about, reason)


def limit_conditions(runtime: Runtime) -> Iterator[Condition]:
    """Yield that new kernels of the node's runtime have no limits."""
    if runtime.unlimited:
        reason = f"new kernels have no limits of {runtime.unlimited}: agentd cannot create cgroups"
        remedy = "make /sys/fs/cgroup writable and restart agentd"
        yield Condition(f"runtime/{runtime.name}", reason, remedy)


def excess_conditions(node: Node) -> Iterator[Condition]:
    """Yield the devices that are held by more than they have."""
    state, by_id = node.state, node.devices.inventory.by_id
    observed = [claim for claim in state.claims.values() if claim.is_observed]
    observed_ids = {share.device_id for claim in observed for share in claim.allocation.shares}
    for device_id in state.ledger.shares_by_device:
        if device_id in by_id and state.ledger.excess(by_id[device_id]):
            holders = state.ledger.holders(device_id)
            texts = " and ".join(map(holder_text, holders))
            agents = tuple({state.ledger.holdings[holder].agent_id for holder in holders})
            cause = "an engine uses it already" if device_id in observed_ids else "it has less"
            reason = f"device {device_id} is held by {texts}: {cause}"
            yield Condition(f"device/{device_id}", reason, agents=agents)


def kernel_conditions(state: NodeState) -> Iterator[Condition]:
    """Yield the kernels that live and have a reason, and the claims that cannot be read."""
    for kernel in state:
        if kernel.reason and kernel.state in LIVE:
            reason = f"kernel {kernel.kernel_id}: {kernel.reason}"
            about = f"kernel/{kernel.kernel_id}"
            yield Condition(about, reason, agents=(kernel.agent_id,))
    for claim in state.claims.values():
        if claim.unreadable_reason:
            reason = f"claim {claim.claim_id}: {claim.unreadable_reason}"
            remedy = f"if nothing uses its devices: agentctl release {claim.claim_id}"
            yield Condition(f"claim/{claim.claim_id}", reason, remedy, agents=(claim.agent_id,))


def agent_conditions(node: Node) -> Iterator[Condition]:
    """Yield the agents that are not configured but still hold devices."""
    holders_by_agent = group(
        (holding.agent_id, holder_text(holder))
        for holder, holding in node.state.ledger.holdings.items()
        if holding.agent_id not in node.devices.split.partitions and holding.allocation.shares
    )
    for agent, holders in holders_by_agent.items():
        name = agent or "unknown"
        reason = f"agent {name} was removed from the configuration; devices are still held by"
        yield Condition(f"agent/{name}", f"{reason} {', '.join(holders)}", agents=(agent,))


def engine_conditions(engines: AwaitedEngines) -> Iterator[Condition]:
    """Yield the engines that devices wait for since the boot, and what engines report."""
    yield from engines.reported_conditions()
    for engine in engines.statuses():
        if engine.devices and not engine.is_ready:
            reason = f"engine {engine.engine} has not reported since the boot of this node"
            yield Condition(f"engine/{engine.engine}", f"{reason}: its devices are given to nobody")
