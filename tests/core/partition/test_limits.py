"""The most that an agent may hold in shared mode: what a limit says, and what it promises."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import Allocation, Ledger
from agentd.core.allocation.policy import AllocationPolicy
from agentd.core.devices import DeviceId, Inventory
from agentd.core.listings import apply_listing
from agentd.core.partition.rules import (
    AgentRule,
    AllocationMode,
    Amount,
    Percent,
    SplitRules,
    parse_limit_rule,
)
from agentd.core.partition.split import Split, split
from agentd.core.slots import ONE, ResourceSlots, SlotKind
from agentd.errors import ConfigRefused, InsufficientResource
from core.machines import CPU, GIB, MEM, cores, gpus, machine, memory, texts
from core.placing import CENT, slots

HALF = Amount("0.5")


def limited(inventory: Inventory, *limits: dict, mode=AllocationMode.SHARED, align=1) -> Split:
    agents = tuple(AgentRule(f"a{n}", limits=given) for n, given in enumerate(limits, 1))
    return split(inventory, SplitRules(mode, agents, align=align))


def one_gpu(quantum: int = CENT) -> Inventory:
    return machine(*cores(4), *gpus(1, slot="cuda.shares"), memory(8 * GIB), quantum=quantum)


def ask(node: Split, ledger: Ledger, agent: str, **amounts: float) -> Allocation:
    part = node.partitions[agent]
    return allocate(ledger, node.inventory, part, slots(**amounts), AllocationPolicy())


def shown(node: Split) -> dict[str, dict[str, tuple[str, bool]]]:
    return {
        agent: {name: (str(limit), name in node.guaranteed) for name, limit in part.limits.items()}
        for agent, part in node.partitions.items()
    }


@pytest.mark.parametrize(
    ("limits", "expected", "warning"),
    [
        (({"cuda": HALF}, {"cuda": Amount("0.75")}),
         {"a1": {"cuda": ("0.5", False)}, "a2": {"cuda": ("0.75", False)}},
         "cuda: the limits add up to 1.25 of 1, so none of them is guaranteed"),
        (({"cuda": HALF}, {}), {"a1": {"cuda": ("0.5", False)}, "a2": {}},
         "cuda: a2 has no limit, so no part of it is guaranteed"),
        (({"cuda": Amount("0")}, {"cuda": Amount("1")}),
         {"a1": {"cuda": ("0", True)}, "a2": {"cuda": ("1", True)}}, None),
        (({"cpu": Percent(Fraction(50)), "mem": Percent(Fraction(50))}, {"cpu": Amount("2"),
           "mem": Amount("4g")}),
         {"a1": {"cpu": ("2", True), "mem": (str(4 * GIB), True)},
          "a2": {"cpu": ("2", True), "mem": (str(4 * GIB), True)}}, None),
    ],
)  # fmt: skip
def test_limits_are_guaranteed_only_when_they_add_up(limits, expected, warning) -> None:
    node = limited(one_gpu(), *limits)
    assert shown(node) == expected
    assert texts(node) == ((warning,) if warning else ())


def test_guarantee_covers_the_amount_on_several_devices() -> None:
    inventory = machine(*cores(2), *gpus(1, 1, slot="cuda.shares"), memory(), quantum=CENT)
    node = limited(inventory, {"cuda": Amount("1")}, {"cuda": Amount("1")})
    (warning,) = texts(node)
    assert warning.startswith("cuda: the amounts are guaranteed, not in one piece")


@pytest.mark.parametrize(
    ("rule", "where", "why"),
    [
        ({"gpu": HALF}, "gpu", "unknown device name 'gpu'; available: cpu, cuda, mem"),
        ({"cpu": Percent(Fraction(30))}, "cpu",
         "30% of 4 cpu is not a whole number; the nearest are 1 (25%) and 2 (50%)"),
        ({"cpu": HALF}, "cpu", "0.5 cpu: these devices are given whole"),
        ({"cuda": Amount("4g")}, "cuda", "'4g' is a size, expected a plain decimal"),
        ({"cuda": Amount("0.0000001")}, "cuda", "not a multiple of 0.000001"),
    ],
)  # fmt: skip
def test_a_limit_that_cannot_be_is_refused_with_its_place(rule, where, why) -> None:
    with pytest.raises(ConfigRefused) as refused:
        limited(one_gpu(), {}, rule)
    (problem,) = refused.value.problems
    assert problem.where == f"agents.1.resource.limits.{where}"
    assert why in problem.why


def test_limits_warn_outside_shared_mode() -> None:
    node = limited(one_gpu(), {"cuda": HALF}, {}, mode=AllocationMode.AUTO_SPLIT)
    assert shown(node) == {"a1": {}, "a2": {}}
    assert "limits of a1 are not used in auto-split mode: it has devices" in texts(node)


@pytest.mark.parametrize(
    ("raw", "rule"),
    [(0.5, HALF), ("0.5", HALF), (2, Amount("2")), ("16g", Amount("16g")),
     ("50%", Percent(Fraction(50)))],
)  # fmt: skip
def test_limits_are_read(raw, rule) -> None:
    assert parse_limit_rule(raw) == rule


@pytest.mark.parametrize("raw", [-1, "half", True, "120%", [1], "1e3"])
def test_invalid_limits_are_refused(raw) -> None:
    with pytest.raises(ValueError, match=r"write an amount|more than 100%"):
        parse_limit_rule(raw)


def test_a_limit_that_shrank_touches_nothing_that_runs() -> None:
    before = limited(one_gpu(), {"cuda": Amount("1")}, {})
    ledger = Ledger().with_holding("k1", "a1", ask(before, Ledger(), "a1", cuda_shares=0.8))
    now = limited(one_gpu(), {"cuda": HALF}, {})
    assert ledger.limit_headroom(now.partitions["a1"], "cuda") == 0
    assert ledger.holdings["k1"].allocation.shares[0].amount == round(0.8 * ONE)
    with pytest.raises(InsufficientResource):
        ask(now, ledger, "a1", cuda_shares=0.01)
    assert ask(now, ledger, "a2", cuda_shares=0.2)


@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), max_size=25),
)
def test_limits_and_guarantees_hold_for_all_agents(
    limits: list[int], requests: list[tuple[int, int]]
) -> None:
    """On one device in parts: whatever is asked in whatever order, limits hold; what is guaranteed
    can be had in full at any moment, whatever the others hold."""
    node = limited(one_gpu(), *({"cuda": Amount(str(cent / 100))} for cent in limits))
    agents = [*node.partitions]
    is_guaranteed = sum(limits) <= 100
    ledger = Ledger()
    for number, (who, amount) in enumerate(requests):
        agent = agents[who % len(agents)]
        limit = node.partitions[agent].limits["cuda"]
        assert ("cuda" in node.guaranteed) is is_guaranteed
        fits = ledger.agent_limit_usage(agent, "cuda") + amount * CENT <= limit.amount
        try:
            got = allocate(
                ledger, node.inventory, node.partitions[agent],
                ResourceSlots({"cuda.shares": amount * CENT}), AllocationPolicy(),
            )  # fmt: skip
        except InsufficientResource as refused:
            assert not (fits and is_guaranteed)
            assert ("limit:" in str(refused)) is not fits
        else:
            assert fits
            ledger = ledger.with_holding(f"k{number}", agent, got)
        if number % 3 == 2:
            ledger = ledger.without(f"k{number - 1}")
        for name in agents:
            held = sum(
                share.amount
                for holding in ledger.holdings.values()
                if holding.agent_id == name
                for share in holding.allocation.shares
            )
            assert (
                held
                == ledger.agent_limit_usage(name, "cuda")
                <= node.partitions[name].limits["cuda"].amount
            )


def test_a_limit_of_a_name_whose_plugin_is_late_waits_for_it() -> None:
    """Its devices are remembered, its slots are not known: nothing is judged by them."""
    (gpu,) = gpus(1, slot="cuda.shares")
    late = Inventory.of([CPU, MEM], [*cores(4), replace(gpu, gone=True), memory(8 * GIB)])
    for rule in (HALF, Percent(Fraction(50))):
        rules = SplitRules(AllocationMode.SHARED, (AgentRule("a1", limits={"cuda": rule}),))
        node = split(late, rules, {"cuda": "plugin pending: no driver"})
        assert shown(node) == {"a1": {}}


def test_a_guarantee_ends_with_the_device_that_it_needs() -> None:
    inventory = machine(*cores(2), *gpus(1, 1), memory())
    node = limited(inventory, {"cuda": Amount("1")}, {"cuda": Amount("1")})
    assert "cuda" in node.guaranteed
    lost, _ = apply_listing(node.inventory, "cuda", gpus(1))
    assert "cuda" not in node.with_inventory(lost).guaranteed


def test_a_guarantee_counts_what_can_be_given_in_steps() -> None:
    inventory = machine(*cores(2), *gpus(1, 1, 1, slot="cuda.shares"), memory(),
                        quantum=60 * CENT)  # fmt: skip
    node = limited(inventory, {"cuda": Amount("1.5")}, {"cuda": Amount("1.5")})
    assert "cuda" not in node.guaranteed


def test_a_limit_is_of_one_unit() -> None:
    chips = gpus(1, slot="tpu.chip")
    bytes_too = replace(chips[0], slot="tpu.hbm", kind=SlotKind.BYTES, stable_id="H",
                        device_id=DeviceId("tpu", "h0"))  # fmt: skip
    inventory = machine(*cores(2), *chips, bytes_too, memory())
    with pytest.raises(ConfigRefused, match="in units and in bytes"):
        limited(inventory, {"tpu": Amount("1")})
