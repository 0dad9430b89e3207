"""A node of fakes, and what tests of the services do with it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from agentd.core.allocation.policy import AllocationPolicy
from agentd.core.allocation.ports import PortRange
from agentd.core.devices import Withholding
from agentd.core.kernel.states import Kernel, KernelSpec
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitRules
from agentd.core.slots import ONE, SlotKind, SlotType
from agentd.events import EventLog
from agentd.services.claims.claim_ends import ClaimEnds
from agentd.services.claims.claim_service import ClaimService
from agentd.services.claims.counts import ClaimCounts
from agentd.services.claims.records import restore_claims
from agentd.services.counts import NodeCounts
from agentd.services.devices import NodeDevices
from agentd.services.kernels.kernel_service import KernelService
from agentd.services.kernels.pending_creates import PendingCreates
from agentd.services.kernels.reconciler import Reconciler, ReconcilerLoops
from agentd.services.kernels.records import persist_changes, restore_kernels
from agentd.services.lost_cores import LostCores
from agentd.services.node import Node, NodeContext
from agentd.services.planner import NodeRules, Planner
from agentd.services.protocols import Clock, PluginListing
from agentd.services.state import NodeState
from core.machines import CPU, GIB, MEM, cores, gpus, memory
from support.fakes import FakeHolders, FakeMemory, FakePlugins, FakeRuntime
from support.waiting import until

CUDA = SlotType("cuda.device", SlotKind.COUNT, ONE)


SHARED = SplitRules(AllocationMode.SHARED, (AgentRule("a"), AgentRule("b")))


class Rig:
    """A node of fakes with two GPUs and two agents, shared; the clock stands still."""

    def __init__(
        self,
        memory_of_node: FakeMemory | None = None,
        *others: str,
        rules: SplitRules = SHARED,
        pending: Sequence[str] = (),
        listings: Sequence[PluginListing] | None = None,
    ) -> None:
        self.runtime = FakeRuntime()
        two_gpus = PluginListing("cuda", (CUDA,), tuple(gpus(1, 1)))
        self.plugins = FakePlugins(*([two_gpus] if listings is None else listings))
        self.plugins.pending = [*pending]
        self.memory = memory_of_node or FakeMemory()
        self.now = 1000.0
        host = [*cores(4), memory(8 * GIB)]
        events = EventLog()
        self.devices = NodeDevices(self.plugins, self.memory, rules, (CPU, MEM), host, events)
        self.devices.discover()
        slots, real = {"cpu": 1, "mem": "256m"}, frozenset("0123")
        node_rules = NodeRules("n", AllocationPolicy(), slots, real, PortRange(), lambda *_: True)
        self.planner = planner = Planner(self.devices, self.plugins, node_rules)
        self.clock = Clock(lambda: self.now, lambda: self.now, lambda: self.now)
        self.runtimes = {"fake": self.runtime}
        self.state = NodeState([*self.runtimes, *others], events)
        self.state.subscribe(planner.notify_plugins)
        persist_changes(self.state, self.memory, "n")
        counts = NodeCounts(self.clock.steady), ClaimCounts()
        self.node = Node(self.state, self.devices, events, *counts)
        common = (self.runtimes, "fake", self.memory, self.clock)
        self.creates = PendingCreates(self.state, self.clock)
        self.available_cores = {0, 1, 2, 3}
        self.cores = LostCores(self.devices, real, lambda: self.available_cores, self.clock.steady)
        self.devices.set_withholding(lambda _: Withholding(lost=self.cores.reasons))
        self.service = KernelService(self.node, planner, self.creates, *common, self.cores)
        self.holders = FakeHolders()
        self.events = events
        self.claim_ends = ClaimEnds(self.node, self.memory, self.holders, self.clock)
        self.claims = ClaimService(
            self.node,
            NodeContext("n", "boot-1", self.clock),
            planner,
            self.plugins,
            self.memory,
            self.claim_ends,
        )
        self.state.subscribe(self.claims.on_kernel_change)
        self.reconciler = Reconciler(self.node, *common)
        self.reconciler._watched_runtimes.add("fake")

    def recall(self) -> None:
        claims = restore_claims(self.state, self.devices, self.memory.load_claims(), self.now)
        records = self.memory.load_records()
        restore_kernels(self.state, self.devices, records, "fake", self.clock)
        self.claims.resume_claims(claims)

    async def relist(self) -> None:
        await self.reconciler.relist(self.runtime)

    def spec(self, kernel_id: str = "k1", agent: str = "a", *command: str, **slots) -> KernelSpec:
        amounts = {name.replace("_", "."): amount for name, amount in slots.items()}
        words = command or ("sleep", "1000")
        return KernelSpec(kernel_id, agent, words, f"{agent}{words}{amounts}", slots=amounts)

    async def create(self, *args, **slots) -> Kernel:
        kernel, _ = await self.service.create(self.spec(*args, **slots))
        return kernel

    @property
    def free_gpus(self) -> int:
        partition = self.devices.partition("a")
        devices = self.devices.inventory.by_name["cuda"]
        return sum(self.state.ledger.free(d, partition) for d in devices) // ONE

    @property
    def states(self) -> dict[str, str]:
        return {kernel.kernel_id: kernel.state.value for kernel in self.state}


@contextlib.asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    """The same, with the reconciler's loops running."""
    loops = ReconcilerLoops(rig.reconciler, rig.node, rig.runtimes, rig.plugins)
    task = asyncio.create_task(loops.run())
    try:
        async with asyncio.timeout(5):
            while not rig.runtime._followers:
                await asyncio.sleep(0)
        yield rig
    finally:
        task.cancel()


async def settled(rig: Rig, kernel_id: str, state: str) -> None:
    await until(lambda: rig.states.get(kernel_id), state, within_s=5)
