"""A node over its life: allocate, release, adopt, health, drains, another partition.

After every step the promises of the core hold, whatever came before.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import Allocation, Ledger, Share
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.devices import MEMORY, Device, Health, Inventory
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitRules, parse_device_rule
from agentd.core.partition.rules import parse_memory_rule as mem
from agentd.core.partition.split import Split, split
from agentd.core.slots import ONE, ResourceSlots, SlotKind, SlotType
from agentd.errors import InsufficientResource
from core.machines import CPU, GIB, MEM, cores, gpus, memory

CENT = ONE // 100
MIG = "cuda.device:1g.10gb-mig"
TYPES = {
    "cuda.device": SlotType("cuda.device", SlotKind.COUNT, ONE),
    MIG: SlotType(MIG, SlotKind.UNIQUE, ONE),
    "npu.shares": SlotType("npu.shares", SlotKind.COUNT, CENT),
    "vram.bytes": SlotType("vram.bytes", SlotKind.BYTES, 1),
    "cpu": CPU,
    "mem": MEM,
}


def machine() -> list[Device]:
    """Whole GPUs beside a MIG part, shares of unequal size, a slot in bytes, three NUMA nodes."""
    whole = gpus(1, 1, 1, nodes=(0, 1, 2))
    part = replace(
        gpus(1, 1, 1, 1, nodes=(0, 1, 2, None))[3], slot=MIG, kind=SlotKind.UNIQUE, parent="GPU-p"
    )
    shares = gpus(1, 0.5, 2, slot="npu.shares", nodes=(0, None, 2))
    room = [
        replace(d, kind=SlotKind.BYTES, capacity=GIB)
        for d in gpus(1, 1, slot="vram.bytes", nodes=(0, 1))
    ]
    return [*cores(6, 3), memory(8 * GIB), *whole, part, *shares, *room]


def rules(mode: AllocationMode) -> SplitRules:
    agents = tuple(
        AgentRule(
            name,
            parse_device_rule(3),
            mem("4g"),
            {
                "cuda": parse_device_rule(2),
                "npu": parse_device_rule(n),
                "vram": parse_device_rule(1),
            },
            described=mode is AllocationMode.MANUAL,
        )
        for n, name in ((1, "a"), (2, "b"))
    )
    return SplitRules(mode, agents)


REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "cuda.device": st.integers(0, 3).map(lambda n: n * ONE),
        MIG: st.sampled_from([0, ONE]),
        "npu.shares": st.integers(0, 250).map(lambda n: n * CENT),
        "vram.bytes": st.integers(0, GIB),
        "cpu": st.integers(0, 4).map(lambda n: n * ONE),
        "mem": st.integers(0, 3 * GIB),
    },
)
POLICIES = st.builds(
    AllocationPolicy, st.sampled_from(Strategy), st.sampled_from(Affinity), st.booleans()
)
AGENTS = st.sampled_from("ab")


class Node(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.overcommitted: dict[object, int] = {}
        self.count = 0
        self.split: Split = self._split(AllocationMode.SHARED, machine())

    def _split(self, mode: AllocationMode, devices: list[Device]) -> Split:
        return split(Inventory.of(TYPES.values(), devices), rules(mode))

    @initialize(mode=st.sampled_from(AllocationMode))
    def start(self, mode: AllocationMode) -> None:
        self.split = self._split(mode, machine())

    @rule(agent=AGENTS, request=REQUESTS, policy=POLICIES)
    def allocate(self, agent: str, request: dict[str, int], policy: AllocationPolicy) -> None:
        before, asked = self.ledger, ResourceSlots(request)
        part, inventory = self.split.partitions[agent], self.split.inventory
        free = {d.device_id: before.free(d, part) for d in inventory.devices}
        try:
            given = allocate(before, inventory, part, asked, policy)
        except InsufficientResource as error:
            assert self.ledger == before
            assert all(row["reason"] for row in error.explain)
            return
        total = ResourceSlots()
        for share in given.shares:
            total += ResourceSlots({share.slot: share.amount})
            assert 0 < share.amount <= free[share.device_id]
            assert share.amount % TYPES[share.slot].quantum == 0
        assert total == asked
        written_anew = Ledger()
        for name, holding in reversed(before.holdings.items()):
            written_anew = written_anew.with_holding(name, holding.agent_id, holding.allocation)
        assert allocate(written_anew, inventory, part, asked, policy) == given
        backwards = ResourceSlots(dict(reversed(list(request.items()))))
        assert allocate(before, inventory, part, backwards, policy) == given
        self.count += 1
        self.ledger = before.with_holding(f"k{self.count}", agent, given)
        back = self.ledger.without(f"k{self.count}")
        assert (back.holdings, back.shares_by_device) == (before.holdings, before.shares_by_device)

    @rule(data=st.data())
    def end_a_kernel(self, data: st.DataObject) -> None:
        if self.ledger.holdings:
            name = data.draw(st.sampled_from(sorted(self.ledger.holdings)))
            self.ledger = self.ledger.without(name)
            assert self.ledger.without(name) is self.ledger

    @rule(agent=st.sampled_from(["a", "b", "gone"]), data=st.data())
    def adopt(self, agent: str, data: st.DataObject) -> None:
        """A kernel is found that holds something, whatever else is held."""
        device = data.draw(st.sampled_from(self.split.inventory.devices))
        slot = data.draw(st.sampled_from([device.slot, "old.slot"]))
        share = Share(
            device.device_id, device.stable_id, slot, device.kind, max(1, device.capacity // 2)
        )
        self.count += 1
        self.ledger = self.ledger.with_holding(f"k{self.count}", agent, Allocation((share,)))
        over = self.ledger.used(device.device_id) - device.capacity
        if over > 0:
            self.overcommitted[device.device_id] = over

    @rule(data=st.data(), health=st.sampled_from(Health), gone=st.booleans(), drained=st.booleans())
    def change_a_device(
        self, data: st.DataObject, health: Health, gone: bool, drained: bool
    ) -> None:
        device = data.draw(st.sampled_from(self.split.inventory.devices))
        if device.device_id != MEMORY:
            changed = replace(device, health=health, gone=gone, drained=drained)
            self.split = self.split.with_inventory(self.split.inventory.with_device(changed))

    @rule(mode=st.sampled_from(AllocationMode))
    def change_the_partition(self, mode: AllocationMode) -> None:
        self.split = self._split(mode, list(self.split.inventory.devices))

    @invariant()
    def no_device_gives_more_than_it_has(self) -> None:
        for device in self.split.inventory.devices:
            over = self.ledger.used(device.device_id) - device.capacity
            assert over <= self.overcommitted.get(device.device_id, 0)
            self.overcommitted[device.device_id] = max(0, over)

    @invariant()
    def what_cannot_be_given_is_not_free(self) -> None:
        for part in self.split.partitions.values():
            for device in self.split.inventory.devices:
                free = self.ledger.free(device, part)
                assert 0 <= free <= device.capacity
                if not device.is_usable or device.device_id not in part.members:
                    assert free == 0
                if any(
                    s.slot != device.slot for s in self.ledger.holders(device.device_id).values()
                ):
                    assert free == 0

    @invariant()
    def what_is_held_by_device_is_what_the_holdings_say(self) -> None:
        anew = Ledger()
        for name, holding in self.ledger.holdings.items():
            anew = anew.with_holding(name, holding.agent_id, holding.allocation)
        assert anew == self.ledger

    @invariant()
    def outside_shared_mode_no_device_has_two_owners(self) -> None:
        for device in self.split.inventory.devices:
            owners = self.split.owners(device.device_id)
            if self.split.mode is not AllocationMode.SHARED and device.device_id != MEMORY:
                assert len(owners) <= 1

    @invariant()
    def agents_slots_add_up_to_the_nodes(self) -> None:
        total = ResourceSlots()
        for agent in self.split.partitions:
            total += self.split.agent_slots(agent)
        if self.split.mode is AllocationMode.AUTO_SPLIT:
            assert total == self.split.node_slots()
        elif self.split.mode is AllocationMode.MANUAL:
            node = self.split.node_slots()
            assert all(amount <= node[slot] for slot, amount in total.items())


TestNode = Node.TestCase
TestNode.settings = settings(stateful_step_count=30)
