"""Creates, ends and restarts with slots switched on and off, against a plain model."""

from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import Ledger
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.devices import Inventory
from agentd.core.kernel.adoption import resolve_devices
from agentd.core.kernel.record import decode_device_label, encode_device_label
from agentd.core.partition.rules import AgentRule, AllocationMode, Amount, SplitRules
from agentd.core.partition.split import Split, split
from agentd.core.slots import ResourceSlots
from agentd.errors import InsufficientResource
from core.machines import cores, memory
from core.several_slots import CENT, GPU_MEMORY, MIB, TYPES, gpu

DEVICES = (gpu(0, 1), gpu(1, 0.5, numa_node=0), gpu(2, 1, numa_node=1), gpu(3, None))
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "cuda.shares": st.integers(0, 250).map(lambda n: n * CENT),
        "cuda.mem": st.integers(0, 2000).map(lambda n: n * MIB),
    },
)
POLICIES = st.builds(
    AllocationPolicy, st.sampled_from(Strategy), st.sampled_from(Affinity), st.booleans()
)
LIMIT = 2


class SeveralSlots(RuleBasedStateMachine):
    """Two agents share four GPUs, one without memory; one agent has a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.split = self._split(has_memory=True)
        self.ledger = Ledger()
        self.labels: dict[str, tuple[str, str]] = {}
        self.excused: set[tuple[object, str]] = set()
        """Device and slot where a restart charged more than there is."""
        self.count = 0

    def _split(self, *, has_memory: bool) -> Split:
        devices = [device if has_memory else replace(device, secondary=()) for device in DEVICES]
        types = [t for t in TYPES.values() if has_memory or t is not GPU_MEMORY]
        inventory = Inventory.of(types, [*cores(1), memory(), *devices])
        limits = {"cuda": Amount(str(LIMIT))}
        rules = (AgentRule("a", limits=limits), AgentRule("b"))
        return split(inventory, SplitRules(AllocationMode.SHARED, rules))

    def _sums(self) -> dict[tuple[object, str], int]:
        """Return the plain model: the sum of each slot of each device, from all holdings."""
        sums: dict[tuple[object, str], int] = {}
        for holding in self.ledger.holdings.values():
            for share in holding.allocation.shares:
                for slot, _, amount in share.amounts:
                    key = (share.device_id, slot)
                    sums[key] = sums.get(key, 0) + amount
        return sums

    @rule(agent=st.sampled_from("ab"), request=REQUESTS, policy=POLICIES)
    def create(self, agent: str, request: dict[str, int], policy: AllocationPolicy) -> None:
        inventory, part = self.split.inventory, self.split.partitions[agent]
        known = {name: n for name, n in request.items() if name in inventory.slot_types}
        asked = ResourceSlots(known)
        try:
            given = allocate(self.ledger, inventory, part, asked, policy)
        except InsufficientResource as error:
            assert all(row["reason"] for row in error.explain)
            assert error.slot in asked
            return
        anew = Ledger()
        for name, holding in reversed(self.ledger.holdings.items()):
            anew = anew.with_holding(name, holding.agent_id, holding.allocation)
        assert allocate(anew, inventory, part, asked, policy) == given
        totals = {slot: each.amount for slot, each in given.totals().items()}
        assert {name: totals.get(name, 0) for name in asked} == dict(asked)
        before = self._sums()
        self.count += 1
        self.ledger = self.ledger.with_holding(f"k{self.count}", agent, given)
        self.labels[f"k{self.count}"] = agent, encode_device_label(given)
        after = self._sums()
        for share in given.shares:
            device = inventory.by_id[share.device_id]
            assert share.slot_names == device.slot_names
            for slot, _, amount in share.amounts:
                assert amount > 0
                assert amount % TYPES[slot].quantum == 0
                assert after[device.device_id, slot] <= device.capacity_of(slot)
        assert before.keys() <= after.keys()
        if agent == "a":
            assert self._fractions("a") <= LIMIT

    def _fractions(self, agent: str) -> Fraction:
        """Return what an agent's kernels take of devices, each with its largest fraction."""
        return sum(
            (
                max(
                    Fraction(amount, self.split.inventory.by_id[share.device_id].capacity_of(slot))
                    for slot, _, amount in share.amounts
                    if slot in self.split.inventory.by_id[share.device_id].slot_names
                )
                for holding in self.ledger.holdings.values()
                if holding.agent_id == agent
                for share in holding.allocation.shares
            ),
            Fraction(0),
        )

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.ledger.holdings:
            name = data.draw(st.sampled_from(sorted(self.ledger.holdings)))
            self.ledger = self.ledger.without(name)
            del self.labels[name]

    @rule(has_memory=st.booleans())
    def restart(self, has_memory: bool) -> None:
        """Adopt every kernel by what is written on it; nothing that is written changes."""
        self.split = self._split(has_memory=has_memory)
        inventory, self.ledger = self.split.inventory, Ledger()
        for name, (agent, label) in self.labels.items():
            allocation, missing = resolve_devices(decode_device_label(label), inventory)
            assert not missing
            assert set(label.split()) <= set(encode_device_label(allocation).split())
            self.ledger = self.ledger.with_holding(name, agent, allocation)
        for device in DEVICES:
            assert not self.ledger.whole_device_holders(inventory.by_id[device.device_id])
        self._excuse()

    def _excuse(self) -> None:
        """Slots that were switched on may be charged beyond what there is; nothing is added."""
        for (device_id, slot), amount in self._sums().items():
            if amount > self.split.inventory.by_id[device_id].capacity_of(slot):
                assert slot == GPU_MEMORY.name
                self.excused.add((device_id, slot))

    @invariant()
    def no_sum_passes_a_capacity(self) -> None:
        for (device_id, slot), amount in self._sums().items():
            device = self.split.inventory.by_id[device_id]
            if (device_id, slot) in self.excused and slot in device.slot_names:
                continue
            if slot in device.slot_names:
                assert amount <= device.capacity_of(slot)

    @invariant()
    def the_ledger_is_what_its_holdings_say(self) -> None:
        sums = self._sums()
        for device in self.split.inventory.devices:
            for slot in device.slot_names:
                assert self.ledger.used(device.device_id, slot) == sums.get(
                    (device.device_id, slot), 0
                )
        anew = Ledger()
        for name, holding in reversed(self.ledger.holdings.items()):
            anew = anew.with_holding(name, holding.agent_id, holding.allocation)
        assert anew == self.ledger


SeveralSlots.TestCase.settings = settings(stateful_step_count=25, deadline=None)
TestSeveralSlots = pytest.mark.timeout(1800)(SeveralSlots.TestCase)
