from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentd.core.conditions import Condition
from agentd.core.devices import DeviceId
from agentd.core.listings import apply_listing
from agentd.core.partition.auto_split import split_units
from agentd.core.partition.manual import missing_by_name
from agentd.core.partition.rules import (
    AgentRule,
    AllocationMode,
    SplitRules,
    parse_device_rule,
    parse_memory_rule,
)
from agentd.core.partition.split import split
from agentd.core.remembered_devices import merge_remembered
from agentd.core.slots import ONE
from agentd.errors import ConfigRefused
from core.machines import GIB, cores, gpus, machine, memory, texts

NODE = machine(*cores(8), memory(), *gpus(1, 1, 1, 1, 1))


def agents(*names: str) -> tuple[AgentRule, ...]:
    return tuple(AgentRule(name) for name in names)


def described(name: str, cpu: object = 2, mem: object = "8g", **devices: object) -> AgentRule:
    return AgentRule(
        name,
        None if cpu is None else parse_device_rule(cpu),
        None if mem is None else parse_memory_rule(mem),
        {key: parse_device_rule(value) for key, value in devices.items()},
        described=True,
    )


def manual(*rules: AgentRule, **more: object) -> SplitRules:
    return SplitRules(AllocationMode.MANUAL, rules, **more)


def ids(result, agent: str, name: str) -> list[str]:
    return [d.id for d in result.partitions[agent].devices if d.name == name]


def test_no_agents_means_one_that_owns_everything() -> None:
    for mode in AllocationMode:
        result = split(NODE, SplitRules(mode, ()))
        assert list(result.partitions) == ["main"]
        assert result.agent_slots("main") == result.node_slots()
        assert set(result.scaling_factors("main").values()) == {Decimal(1)}
        assert not result.unassigned


def test_shared_gives_every_agent_every_device() -> None:
    result = split(NODE, SplitRules(AllocationMode.SHARED, agents("a", "b")))
    assert ids(result, "a", "cuda") == ids(result, "b", "cuda") == [f"cuda{n}" for n in range(5)]
    assert result.scaling_factors("b")["cuda.device"] == 1


def test_five_gpus_for_three_agents_are_two_two_and_one() -> None:
    result = split(NODE, SplitRules(AllocationMode.AUTO_SPLIT, agents("a", "b", "c"), align=2**24))
    assert [ids(result, agent, "cuda") for agent in "abc"] == [
        ["cuda0", "cuda1"],
        ["cuda2", "cuda3"],
        ["cuda4"],
    ]
    assert [len(ids(result, agent, "cpu")) for agent in "abc"] == [3, 3, 2]
    assert result.scaling_factors("a")["cuda.device"] == Decimal("0.4")
    memory_units = [result.partitions[agent].memory_bytes // 2**24 for agent in "abc"]
    assert memory_units == [683, 683, 682]


def test_devices_are_dealt_in_natural_order() -> None:
    node = machine(*cores(2), memory(), *gpus(*[1] * 12))
    result = split(node, SplitRules(AllocationMode.AUTO_SPLIT, agents("a", "b")))
    assert ids(result, "a", "cuda") == [f"cuda{n}" for n in range(6)]


def test_conditions_count_devices_and_name_the_first() -> None:
    node = machine(*cores(2), memory(), *gpus(*[1] * 4096))
    result = split(node, SplitRules(AllocationMode.MANUAL, (described("a", cpu=2, mem="1g"),)))
    text = "cuda0, cuda1, cuda2, cuda3 and 4092 more are assigned to no agent"
    assert result.conditions == (Condition("plugin/cuda", text),)


def test_reservation_is_withheld_from_everyone() -> None:
    rules = SplitRules(
        AllocationMode.AUTO_SPLIT, agents("a", "b"), reserved_cpu=2, reserved_mem=2 * GIB, align=GIB
    )
    result = split(NODE, rules)
    assert result.reserved_cpu == ("0", "1")
    assert ids(result, "a", "cpu") == ["2", "3", "4"]
    assert result.node_slots()["mem"] == 30 * GIB
    assert result.node_slots()["cpu"] == 6 * ONE
    assert result.scaling_factors("a")["cpu"] == Decimal("0.5")
    listed = split(NODE, replace(rules, reserved_cpu=("7", "3")))
    assert ids(listed, "a", "cpu") == ["0", "1", "2"]


@pytest.mark.parametrize("reserved", [2, ("0", "1")])
def test_reserved_core_that_is_missing_stays_reserved(
    reserved: int | tuple[str, ...],
) -> None:
    cores = NODE.by_name["cpu"]
    node = NODE.with_device(replace(cores[1], gone=True))
    rules = SplitRules(AllocationMode.SHARED, agents("a"), reserved_cpu=reserved)
    assert split(node, rules).reserved_cpu == ("0", "1")
    for core in cores[2:]:
        node = node.with_device(replace(core, gone=True))
    result = split(node, rules)  # the others may return
    assert result.reserved_cpu == ("0", "1")
    assert "cpu" not in result.node_slots()


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [
        ({"reserved_cpu": 8}, "resource.reserved-cpu", "leaves no core; the node has 8"),
        ({"reserved_cpu": ("9",)}, "resource.reserved-cpu", "no core 9; the node has 0, 1"),
        ({"reserved_mem": 32 * GIB}, "resource.reserved-mem", "leave no memory"),
    ],
)
def test_a_reservation_that_takes_everything_is_refused(change, where, why) -> None:
    with pytest.raises(ConfigRefused) as caught:
        split(NODE, SplitRules(AllocationMode.SHARED, agents("a"), **change))
    assert any(p.where == where and why in p.why for p in caught.value.problems)


def test_manual_mode_follows_the_rules() -> None:
    result = split(
        NODE,
        manual(
            described("a", cpu=2, mem="50%", cuda="40%"),
            described("b", cpu="4-7", mem="1g", cuda=["GPU-cuda-4", "0000:00:00.0"]),
            reserved_cpu=1,
            align=2**24,
        ),
    )
    assert ids(result, "b", "cpu") == ["4", "5", "6", "7"]
    assert ids(result, "b", "cuda") == ["cuda0", "cuda4"]
    assert ids(result, "a", "cpu") == ["1", "2"]
    assert ids(result, "a", "cuda") == ["cuda1", "cuda2"]
    assert result.partitions["a"].memory_bytes == 16 * GIB
    assert result.unassigned == {"cpu": ("3",), "cuda": ("cuda3",)}
    assert "cuda3 is assigned to no agent" in texts(result)
    assert result.unassigned_memory == 15 * GIB


@pytest.mark.parametrize(
    ("rules", "where", "why"),
    [
        ([described("a", tpu=1)], "agents.0.resource.devices.tpu", "available: cuda"),
        ([described("a", cuda=["cuda9"])], "agents.0.resource.devices.cuda", "available: cuda0,"),
        (
            [described("a", cuda=["cuda1"]), described("b", cuda=["GPU-cuda-1"])],
            "agents.1.resource.devices.cuda",
            "GPU-cuda-1 is assigned to b and to a, too",
        ),
        ([described("a", mem="20g"), described("b", mem="13g")], "agents", "mem adds up to"),
        ([described("a", cpu=None)], "agents.0.resource.cpu", "has no cpu"),
        ([described("a", cpu=0)], "agents.0.resource.cpu", "has no cpu"),
        ([described("a", cpu=[])], "agents.0.resource.cpu", "has no cpu"),
        ([described("a", mem=None)], "agents.0.resource.mem", "has no mem"),
        ([described("a", mem="0")], "agents.0.resource.mem", "has no mem"),
        ([described("a"), AgentRule("b")], "agents.1", "agent b has no [agents.resource]"),
        ([described("a", cpu="0-1")], "agents.0.resource.cpu", "core 0 is reserved"),
        (
            [described("a", cuda="30%")],
            "agents.0.resource.devices.cuda",
            "30% of 5 devices is not a whole number; the nearest counts are 1 (20%) and 2 (40%)",
        ),
        ([described("a", cuda=6)], "agents.0.resource.devices.cuda", "6 of 5 cuda devices for a"),
        ([described("a", cpu=9)], "agents.0.resource.cpu", "7 are left"),
        ([described("a", cpu="99")], "agents.0.resource.cpu", "unknown cpu device '99'"),
    ],
)
def test_manual_mode_refusal_names_key_and_devices(rules, where, why) -> None:
    with pytest.raises(ConfigRefused) as caught:
        split(NODE, manual(*rules, reserved_cpu=1))
    assert any(p.where == where and why in p.why for p in caught.value.problems), str(caught.value)


def test_manual_mode_lists_all_problems_at_once() -> None:
    with pytest.raises(ConfigRefused) as caught:
        split(
            NODE, manual(described("a", cpu=None, mem=None, tpu=1), AgentRule("b"), reserved_cpu=99)
        )
    assert {problem.where for problem in caught.value.problems} == {
        "resource.reserved-cpu",
        "agents.0.resource.cpu",
        "agents.0.resource.mem",
        "agents.0.resource.devices.tpu",
        "agents.1",
    }


def test_missing_or_failed_device_does_not_stop_the_split() -> None:
    node = machine(*cores(4), memory(), *(replace(d, gone=True) for d in gpus(1, 1)))
    result = split(
        node,
        manual(described("a", cuda=["cuda0"], tpu=2)),
        unlisted={"tpu": "plugin tpu failed: no driver"},
    )
    assert ids(result, "a", "cuda") == ["cuda0"]


def test_a_plugin_that_lists_nothing_is_known_all_the_same() -> None:
    node = machine(*cores(4), memory())
    node = replace(node, slot_types={**node.slot_types, **machine(*gpus(1)).slot_types})
    assert split(node, manual(described("a", cuda="all"))).partitions
    with pytest.raises(ConfigRefused, match="unknown cuda device 'cuda0'; available: none"):
        split(node, manual(described("a", cuda=["cuda0"])))


def test_named_device_that_is_missing_is_a_condition() -> None:
    uuid, address = "GPU-00000000-1111-2222-3333-444444444444", "00000000:5e:00.0"
    rules = manual(described("a", cuda=["cuda0", "cuda7", uuid]), described("b", cuda=[address]))
    with pytest.raises(ConfigRefused) as caught:
        split(NODE, rules)
    assert [problem.why for problem in caught.value.problems] == [
        "unknown cuda device 'cuda7'; available: cuda0, cuda1, cuda2, cuda3, cuda4"
    ]
    rules = replace(rules, forgotten=frozenset({DeviceId("cuda", "cuda7")}))
    assert ids(split(NODE, rules), "a", "cuda") == ["cuda0"]
    named = (("cuda7", "a"), (uuid, "a"), (address, "b"))
    missing = "is missing, and the configuration gives it to"
    assert [*missing_by_name(NODE, {"cuda"}, rules)] == [
        Condition(f"device/cuda/{name}", f"{name} {missing} {agent}", agents=(agent,))
        for name, agent in named
    ]
    assert [*missing_by_name(NODE, (), rules)] == []


UUID = "0000abcd-1111-2222-3333-444444444444"


@pytest.mark.parametrize(
    "name",
    ["0000:3b:00.0", "00000000:3B:00.0", "3b:00.0", UUID, f"GPU-{UUID.upper()}", f"gpu-{UUID}"],
)
def test_spelling_of_a_hardware_name_does_not_count(name: str) -> None:
    device = replace(gpus(1)[0], stable_id=f"GPU-{UUID}", aliases=("0000:3b:00.0",))
    node = machine(*cores(4), memory(), device)
    rules = manual(described("a", cuda=[name]))
    assert ids(split(node, rules), "a", "cuda") == ["cuda0"]
    assert [*missing_by_name(node, {"cuda"}, rules)] == []
    exclude = {"cuda": [name]}
    assert machine(device).with_excluded(exclude).devices[-1].is_excluded
    part = replace(device, stable_id="P", aliases=(), parent=f"GPU-{UUID}")
    part = replace(part, parent_aliases=("0000:3b:00.0",))
    assert machine(part).with_excluded(exclude).devices[-1].is_excluded
    node = machine(*cores(4), memory(), gpus(1)[0])
    with pytest.raises(ConfigRefused, match="is excluded in"):
        split(node, manual(described("a", cuda=[name.lower()]), exclude=exclude))


@pytest.mark.parametrize("name", [UUID.upper(), f"GPU-{UUID}", f"gpu-{UUID}"])
def test_missing_device_belongs_to_one_agent_alone(name: str) -> None:
    first, other = (described(agent, 1, cuda=[n]) for agent, n in (("a", UUID), ("b", name)))
    with pytest.raises(ConfigRefused, match=f"{name} is assigned to b and to a, too"):
        split(machine(*cores(4), memory(), *gpus(1)), manual(first, other))
    rules = manual(described("a", 1, cuda=[name]), exclude={"cuda": (UUID,)})
    with pytest.raises(ConfigRefused, match=f"{name} is excluded in"):
        split(machine(*cores(4), memory(), *gpus(1)), rules)


@pytest.mark.parametrize("is_first_gone", [True, False])
def test_present_device_comes_before_a_gone_one_in_its_slot(is_first_gone: bool) -> None:
    pair = [
        replace(device, aliases=("0000:3b:00.0",), gone=gone)
        for device, gone in zip(gpus(1, 1), (is_first_gone, not is_first_gone), strict=True)
    ]
    node = machine(*cores(2), memory(), *pair)
    present, gone = ("cuda1", "cuda0") if is_first_gone else ("cuda0", "cuda1")
    assert ids(split(node, manual(described("a", cuda=["0000:3b:00.0"]))), "a", "cuda") == [present]
    assert ids(split(node, manual(described("a", cuda=[gone]))), "a", "cuda") == [gone]
    assert node.by_identity["0000:3b:00.0"].device_id.id == present


NEW_CARD = replace(gpus(1)[0], stable_id="GPU-new")
REPLACED = machine(*cores(4), memory(), *merge_remembered([NEW_CARD, gpus(1, 1)[1]], gpus(1, 1)))
"""A node with `cuda2` in place of the missing `cuda0`."""


@pytest.mark.parametrize("name", ["cuda0", "GPU-cuda-0"])
def test_replaced_card_that_an_agent_names_is_missing(name: str) -> None:
    """It ends no start, and does not count."""
    rules = manual(described("a", cuda=[name]), described("b", cuda="50%"))
    result = split(REPLACED, rules)
    assert [ids(result, agent, "cuda") for agent in "ab"] == [["cuda0"], ["cuda2"]]
    assert result.agent_slots("a")["cuda.device"] == 0
    assert "cuda1 is assigned to no agent" in texts(result)
    by_address = split(REPLACED, manual(described("a", cuda=["0000:00:00.0"])))
    assert ids(by_address, "a", "cuda") == ["cuda2"]


TWO_AGENTS = {
    "auto-split": SplitRules(AllocationMode.AUTO_SPLIT, agents("a", "b")),
    "manual": manual(described("a", cuda=1), described("b", cuda=1)),
}


@pytest.mark.parametrize("mode", TWO_AGENTS)
def test_replaced_card_that_returns_waits_for_a_restart(mode: str) -> None:
    before = split(REPLACED, TWO_AGENTS[mode])
    assert (before.unassigned.get("cuda"), texts(before)) == (None, ())
    moved = replace(gpus(1)[0], aliases=("0000:09:00.0",))
    inventory, _ = apply_listing(REPLACED, "cuda", [NEW_CARD, *gpus(1, 1)[1:], moved])
    now = before.with_inventory(inventory)
    assert now.unassigned == {"cuda": ("cuda0",)}
    assert texts(now) == ("cuda0 is new; restart agentd to assign it",)
    shared = split(REPLACED, SplitRules(AllocationMode.SHARED, agents("a")))
    assert "cuda0" in ids(shared.with_inventory(inventory), "a", "cuda")


@pytest.mark.parametrize("mode", TWO_AGENTS)
def test_condition_of_a_new_device_ends_with_it(mode: str) -> None:
    node = machine(*cores(4), memory(), *gpus(1, 1))
    result = split(node, TWO_AGENTS[mode])
    for n in range(2):
        new = replace(gpus(1)[0], device_id=DeviceId("cuda", "cuda2"), stable_id=f"N{n}")
        inventory, _ = apply_listing(result.inventory, "cuda", [*gpus(1, 1), new])
        result = result.with_inventory(inventory)
        name = inventory.by_stable_id[f"N{n}"].device_id.id
        assert texts(result) == (f"{name} is new; restart agentd to assign it",)
        inventory, _ = apply_listing(inventory, "cuda", gpus(1, 1))
        result = result.with_inventory(inventory)
        assert (result.unassigned, texts(result)) == ({}, ())
        result = result.with_inventory(inventory.without(DeviceId("cuda", name)))
        assert texts(result) == ()


def test_excluded_device_belongs_to_nobody_and_does_not_count() -> None:
    exclude = {"cuda": ("GPU-cuda-1",)}
    node = NODE.with_excluded(exclude)
    auto = split(node, SplitRules(AllocationMode.AUTO_SPLIT, agents("a", "b"), exclude=exclude))
    assert [ids(auto, agent, "cuda") for agent in "ab"] == [["cuda0", "cuda2"], ["cuda3", "cuda4"]]
    assert (auto.unassigned, auto.node_slots()["cuda.device"]) == ({}, 4 * ONE)
    half = split(node, manual(described("a", cuda="50%"), described("b", cuda=2)))
    assert ids(half, "a", "cuda") == ["cuda0", "cuda2"]
    shared = split(node, SplitRules(AllocationMode.SHARED, agents("a")))
    assert "cuda1" not in ids(shared, "a", "cuda")


@pytest.mark.parametrize("name", ["cuda0", "own", "pci", "whole", "absent"])
def test_agent_that_names_an_excluded_device_is_refused(name: str) -> None:
    uuid = "00000000-1111-2222-3333-444444444444"
    names = {"own": f"MIG-{uuid}", "pci": "0000:3b:00.0", "whole": f"GPU-{uuid}"}
    names["absent"] = f"GPU-9{uuid[1:]}"
    changes = {"stable_id": names["own"], "parent": names["whole"], "aliases": (names["pci"],)}
    device = replace(gpus(1)[0], **changes)
    exclude = {"cuda": (names["whole"], names["absent"])}
    node = machine(*cores(4), memory(), device).with_excluded(exclude)
    wanted = names.get(name, name)
    with pytest.raises(
        ConfigRefused, match=rf"{wanted} is excluded in \[plugins.cuda\]; available"
    ):
        split(node, manual(described("a", cuda=[wanted]), exclude=exclude))


def test_a_single_agent_has_the_scaling_factor_one() -> None:
    for rules in (
        manual(described("a", cpu=2, cuda=1)),
        SplitRules(AllocationMode.AUTO_SPLIT, agents("a"), reserved_mem=1000001, align=2**24),
    ):
        assert set(split(NODE, rules).scaling_factors("a").values()) == {Decimal(1)}


def test_agents_that_get_nothing_are_a_warning() -> None:
    node = machine(*cores(1), memory(8 * GIB))
    result = split(node, SplitRules(AllocationMode.AUTO_SPLIT, agents("a", "b"), align=8 * GIB))
    assert any("agent b has no core" in warning for warning in texts(result))
    assert any("agent b has no memory" in warning for warning in texts(result))


def test_agent_rules_warn_outside_manual_mode() -> None:
    result = split(NODE, SplitRules(AllocationMode.SHARED, (described("a", cpu=1),)))
    assert any("not used in shared mode" in warning for warning in texts(result))


@pytest.mark.parametrize(
    ("raw", "why"),
    [(-1, "invalid"), (True, "invalid"), (0.5, "invalid"), ("101%", "more than"),
     ("3-1", "backwards"), (["a", "a"], "twice"), ("0,0", "twice"), ("1,,2", "invalid"),
     ({"shares": 1}, "invalid")],
)  # fmt: skip
def test_invalid_device_rules_are_refused(raw, why) -> None:
    with pytest.raises(ValueError, match=why):
        parse_device_rule(raw)


@pytest.mark.parametrize("raw", ["x", -1, True, "101%", "1e3", None])
def test_invalid_memory_rules_are_refused(raw) -> None:
    with pytest.raises(ValueError, match=r"; write a size|more than|invalid percentage"):
        parse_memory_rule(raw)


@given(st.integers(0, 500), st.integers(1, 40))
def test_units_differ_by_one_at_most_and_add_up(total, parts) -> None:
    units = split_units(total, parts)
    assert sum(units) == total
    assert len(units) == parts
    assert units == sorted(units, reverse=True)
    assert units[0] - units[-1] <= 1
