import pytest
from msgspec.structs import replace

from agentd.core.allocation.ledger import Allocation
from agentd.core.allocation.ports import Port
from agentd.core.devices import Inventory
from agentd.core.kernel.adoption import KernelUpdate, adopt
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.reconcile import RemoveUnstarted, kernel_after_stop, reconcile
from agentd.core.kernel.states import Ending, Kernel, KernelState, ObservedState
from core.kernels import GPU, HELD, NODE, encoded, found
from core.machines import cores, machine, memory


def known(state: KernelState = KernelState.RUNNING, **changes) -> dict[str, Kernel]:
    kernel = replace(adopt(found(), NODE).kernel, state=state, **changes)
    return {"k1": kernel}


def test_two_lost_devices_of_one_name_stay_two() -> None:
    share = replace(GPU, stable_id="GPU-x")
    other = encoded(kernel_id="k2", allocation=Allocation((share,)))
    node = machine(*cores(4), memory())
    actions = reconcile({}, [found(), found(kernel_id="k2", record=other)], node)
    ids = [action.kernel.allocation.shares[0].device_id.id for action in actions]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("state", "known_as"),
    [
        (ObservedState.RUNNING, KernelState.RUNNING),
        (ObservedState.RUNNING, KernelState.STOPPING),
        (ObservedState.EXITED, KernelState.TERMINATED),
    ],
)
def test_observation_that_is_known_changes_nothing(state, known_as) -> None:
    ended = {"ending": found(state).ending} if known_as is KernelState.TERMINATED else {}
    kernels = known(known_as, **ended)
    assert reconcile(kernels, [found(state)], NODE) == []


def unreadable(state: ObservedState = ObservedState.RUNNING, handle: str = "") -> ObservedKernel:
    item = found(state, record="", handle=handle, record_problem="has mode 0777", device_label="")
    return replace(item, is_unreadable=True)


@pytest.mark.parametrize(
    ("state", "before", "after"),
    [
        (ObservedState.RUNNING, KernelState.RUNNING, KernelState.UNREADABLE),
        (ObservedState.RUNNING, KernelState.CREATING, KernelState.UNREADABLE),
        (ObservedState.RUNNING, KernelState.STOPPING, KernelState.STOPPING),
        (ObservedState.EXITED, KernelState.RUNNING, KernelState.TERMINATED),
        (ObservedState.EXITED, KernelState.UNREADABLE, KernelState.TERMINATED),
    ],
)
def test_unreadable_kernel_keeps_what_is_known(state, before, after) -> None:
    kernels = known(before, handle=None)
    (action,) = reconcile(kernels, [unreadable(state)], NODE)
    kernel = action.kernel
    assert (kernel.state, kernel.reason) == (after, "has mode 0777")
    assert (kernel.allocation, kernel.spec_hash) == (HELD, "hash")
    assert reconcile({"k1": kernel}, [unreadable(state)], NODE) == []


def test_unreadable_kernel_is_adopted_once_it_is_mended() -> None:
    (action,) = reconcile(known(), [unreadable()], NODE)
    (mended,) = reconcile({"k1": action.kernel}, [found()], NODE)
    assert (mended.kernel.state, mended.kernel.reason) == (KernelState.RUNNING, "")


def test_unknown_kernel_with_members_is_adopted_unreadable() -> None:
    (action,) = reconcile({}, [unreadable(handle="c1")], NODE)
    assert action.kernel.state is KernelState.UNREADABLE
    assert "has mode 0777" in action.kernel.reason


@pytest.mark.parametrize("state", [KernelState.TERMINATED, KernelState.LOST])
def test_an_ended_unreadable_kernel_holds_if_it_lives(state: KernelState) -> None:
    (action,) = reconcile(known(state), [unreadable(handle="c1")], NODE)
    assert (action.kernel.state, action.kernel.holds_devices) == (KernelState.UNREADABLE, True)
    assert reconcile(known(state), [unreadable()], NODE) == []
    assert reconcile({}, [unreadable()], NODE) == []


def test_ending_is_learned_from_inspection_not_from_a_list() -> None:
    ended = known(KernelState.TERMINATED)
    (action,) = reconcile(ended, [found(ObservedState.EXITED)], NODE)
    assert isinstance(action, KernelUpdate)
    assert action.kernel.ending == found(ObservedState.EXITED).ending
    partial = replace(
        found(ObservedState.EXITED), ending=Ending(), started_at=None, is_partial=True
    )
    assert reconcile({"k1": action.kernel}, [partial], NODE) == []


def test_ports_of_a_record_without_them_are_the_runtime_s() -> None:
    ports = (Port(80, 30000, "tcp", "127.0.0.1"),)
    (action,) = reconcile({}, [replace(found(), ports=ports)], NODE)
    assert isinstance(action, KernelUpdate)
    assert action.kernel.ports == ports


@pytest.mark.parametrize("handle", ["", "h"])
def test_kernel_seen_running_did_run(handle: str) -> None:
    known = Kernel("k1", "a", KernelState.RUNNING, "", 1.0, "fake", handle="h", started_at=2.0)
    item = ObservedKernel("k1", "a", "fake", handle, ObservedState.CREATED, "", "")
    (action,) = reconcile({"k1": known}, [item], Inventory.of([], []))
    assert isinstance(action, KernelUpdate)
    assert (action.kernel.state, action.kernel.handle) == (KernelState.TERMINATED, "h")
    assert "damaged" in action.kernel.ending.reason
    other = replace(item, handle="another")
    (action,) = reconcile({"k1": known}, [other], Inventory.of([], []))
    assert action == RemoveUnstarted(other)
    assert kernel_after_stop(known, item).state is KernelState.TERMINATED
    assert kernel_after_stop(known, None).state is KernelState.LOST


def test_a_unit_that_has_ended_has_no_process_any_more() -> None:
    units = known(pid=7, unit="u.service")
    ended = replace(found(ObservedState.EXITED), unit="u.service")
    (action,) = reconcile(units, [ended], NODE)
    assert (action.kernel.pid, action.kernel.unit) == (None, "u.service")
    assert kernel_after_stop(units["k1"], ended).pid is None
    (process,) = known(pid=7).values()
    assert kernel_after_stop(process, found(ObservedState.EXITED)).pid == 7
