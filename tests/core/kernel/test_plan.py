import pytest

from agentd.core.allocation.ledger import Allocation, Share
from agentd.core.devices import MEMORY, DeviceId
from agentd.core.kernel.edits import ContainerEdits, merge_edits
from agentd.core.kernel.plan import (
    KernelPlan,
    PlanContext,
    build_plan,
    kernel_name,
    reserved_problems,
)
from agentd.core.kernel.record import decode
from agentd.core.kernel.states import Kernel, KernelSpec, KernelState
from agentd.core.slots import ONE, SlotKind
from agentd.errors import InvalidRequest, PluginUnavailable

NODE = PlanContext("n", ("0", "1", "9"), frozenset({"0", "1"}), frozenset({"mem"}))


def spec(**members) -> KernelSpec:
    return KernelSpec("k1", "a", ("true",), "hash", **members)


def kernel(*shares: Share) -> Kernel:
    held = Allocation(shares)
    return Kernel("k1", "a", KernelState.PREPARING, "hash", 1.0, "fake", allocation=held)


def not_enforced(plan: KernelPlan) -> tuple[str, ...]:
    return decode(plan.record).not_enforced


def core(name: str) -> Share:
    return Share(DeviceId("cpu", name), f"cpu-{name}", "cpu", SlotKind.COUNT, ONE)


def test_a_plan_pins_to_its_cores_and_limits_to_its_memory() -> None:
    made = kernel(core("1"), Share(MEMORY, "mem-root", "mem", SlotKind.BYTES, 64))
    plan = build_plan(spec(env={"A": "1"}), made, ContainerEdits(env={"GPU": "0"}), NODE)
    assert (plan.name, plan.cpus, plan.memory_bytes) == (kernel_name("n", "k1"), ("1",), 64)
    assert plan.env == {"A": "1", "GPU": "0"}
    assert not_enforced(plan) == ("mem",)


def test_a_kernel_without_cores_of_its_own_runs_on_the_agent_s() -> None:
    plan = build_plan(spec(), kernel(), ContainerEdits(), NODE)
    assert plan.cpus == ("0", "1")
    assert "cpu" in not_enforced(plan)


def test_missing_cores_are_reported_not_pinned() -> None:
    plan = build_plan(spec(image="i"), kernel(core("9")), ContainerEdits(), NODE)
    assert plan.cpus == ()
    assert not_enforced(plan) == ("cpu", "mem")


def test_request_cannot_set_reserved_names() -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_plan(spec(env={"GPU": "all"}), kernel(), ContainerEdits(env={"GPU": "0"}), NODE)
    assert [problem.where for problem in caught.value.problems] == ["env.GPU"]
    wrong = spec(env={"AGENTD_X": "1"}, labels={"io.agentd.node": "x", "mine": "y"})
    places = [problem.where for problem in reserved_problems(wrong)]
    assert places == ["env.AGENTD_X", "labels.io.agentd.node"]


def test_no_two_kernels_of_any_nodes_have_one_name() -> None:
    assert kernel_name("a-b", "c") != kernel_name("a", "b-c")


def test_giving_edits_override_hiding_edits() -> None:
    edits = merge_edits(
        [ContainerEdits(env={"GPU": "", "NPU": ""})],
        {
            "gpu": ContainerEdits(env={"GPU": "0"}, groups=("video",)),
            "cam": ContainerEdits(groups=("video",)),
        },
    )
    assert edits.env == {"GPU": "0", "NPU": ""}
    assert edits.groups == ("video",)
    why = "plugin a sets GPU to '0', and plugin b to '1'"
    with pytest.raises(PluginUnavailable, match=why):
        merge_edits(
            [], {"a": ContainerEdits(env={"GPU": "0"}), "b": ContainerEdits(env={"GPU": "1"})}
        )
