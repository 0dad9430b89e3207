import asyncio
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from agentd.core.kernel.observation import Listing, ObservedKernel
from agentd.core.kernel.states import KernelRef, KernelState, ObservedState
from agentd.core.slots import ONE
from agentd.errors import NotReady, OutcomeUnknown, RuntimeFailure, RuntimeUnavailable
from agentd.services.kernels.pending_creates import UNRESOLVED_GRACE_S
from agentd.services.state import RuntimeState
from services.node import Rig, running, settled
from support.fakes import FakeRuntime
from support.waiting import until


async def test_what_cannot_be_removed_yet_is_held_and_tried_again(rig: Rig) -> None:
    await rig.create(cuda_device=2)
    cut_short = replace(rig.runtime.kernels["k1"], state=ObservedState.CREATED)
    after = Rig()
    after.runtime.kernels["k1"] = cut_short
    remove = after.runtime.remove
    after.runtime.remove = AsyncMock(side_effect=RuntimeFailure("500"))
    await after.relist()
    assert (after.states, after.free_gpus) == ({"k1": "creating"}, 0)
    assert after.state.runtime("fake").is_listed
    after.runtime.remove = remove
    await after.reconciler.retry()
    assert (after.states, after.free_gpus) == ({}, 2)


async def test_a_name_that_is_gone_from_the_list_is_no_proof(rig: Rig) -> None:
    await rig.create(cuda_device=1)
    rig.runtime.list_kernels = AsyncMock(return_value=Listing(()))
    await rig.relist()
    assert rig.states == {"k1": "running"}


async def test_an_unknown_outcome_stays_held_until_absence_is_proved(rig: Rig) -> None:
    rig.runtime.fail_create = OutcomeUnknown("the answer was lost")
    with pytest.raises(OutcomeUnknown):
        await rig.create(cuda_device=2)
    assert rig.free_gpus == 0
    await rig.relist()
    assert rig.free_gpus == 0
    rig.now += UNRESOLVED_GRACE_S
    rig.runtime.is_down = True
    with pytest.raises(RuntimeUnavailable):
        await rig.relist()
    assert rig.free_gpus == 0
    rig.runtime.is_down = False
    await rig.relist()
    assert rig.free_gpus == 2
    assert rig.states == {}
    assert rig.memory.records == {}


async def test_a_create_that_comes_true_late_is_adopted(rig: Rig) -> None:
    await rig.create(cuda_device=1)
    late = replace(rig.runtime.kernels["k1"], kernel_id="k2", handle="77")
    record = rig.runtime.plans[0].record.replace('"kernel_id":"k1"', '"kernel_id":"k2"')
    rig.runtime.fail_create = OutcomeUnknown("lost")
    with pytest.raises(OutcomeUnknown):
        await rig.create("k2", cuda_device=1)
    rig.runtime.kernels["k2"] = replace(late, record=record)
    await rig.relist()
    assert rig.states["k2"] == "running"
    assert rig.state.unresolved == {}


async def test_nothing_is_created_before_the_first_complete_list() -> None:
    rig = Rig()
    with pytest.raises(NotReady):
        await rig.create()
    rig.runtime.is_down = True
    with pytest.raises(RuntimeUnavailable):
        await rig.relist()
    await rig.reconciler.wait_first_lists()
    with pytest.raises(RuntimeUnavailable, match="the fake is down"):
        await rig.create()
    rig.runtime.is_down = False
    await rig.relist()
    assert (await rig.create()).state is KernelState.RUNNING


async def test_kernel_started_by_hand_is_charged_beyond_capacity(watched) -> None:
    await watched.create("k1", cuda_device=2)
    await watched.service.stop("k1", 0)
    await watched.create("k2", cuda_device=2)
    watched.runtime.put(replace(watched.runtime.kernels["k1"], state=ObservedState.RUNNING))
    await settled(watched, "k1", "running")
    device = watched.devices.inventory.by_name["cuda"][0]
    assert watched.state.ledger.used(device.device_id) == 2 * ONE
    assert watched.free_gpus == 0


async def test_who_did_not_wait_sees_what_became_of_a_lost_create(rig: Rig) -> None:
    rig.runtime.fail_create = OutcomeUnknown("lost")
    await rig.service.create(rig.spec(cuda_device=1), wait=False)
    await settled(rig, "k1", "creating")
    await until(lambda: "k1" in rig.state.unresolved, within_s=5)
    rig.now += UNRESOLVED_GRACE_S
    await rig.relist()
    assert rig.states == {"k1": "failed"}
    assert rig.free_gpus == 2


async def test_list_does_not_make_an_unfollowed_runtime_available(rig: Rig) -> None:
    rig.reconciler._watched_runtimes.clear()
    rig.state.mark_unavailable("fake", "its event stream ended")
    await rig.reconciler.retry()
    assert rig.state.runtime("fake").state is RuntimeState.UNAVAILABLE
    rig.reconciler._watched_runtimes.add("fake")
    await rig.reconciler.retry()
    assert rig.state.runtime("fake").state is RuntimeState.AVAILABLE


async def test_a_list_that_is_out_of_date_undoes_nothing(rig: Rig) -> None:
    """Kernels created, ended or removed during a list are observed alone, afterwards."""
    await rig.create("gone")
    await rig.create("ends")
    before = Listing(tuple(rig.runtime.kernels.values()))

    async def slow() -> Listing:
        await rig.service.remove("gone")
        await rig.service.stop("ends", 0)
        await rig.create("new", cuda_device=1)
        await rig.create("passing")
        await rig.service.remove("passing")
        return Listing((*before.kernels, replace(before.kernels[0], kernel_id="passing")))

    rig.runtime.list_kernels = slow
    await rig.relist()
    assert rig.states == {"ends": "terminated", "new": "running"}
    assert rig.reconciler._queued == {"gone", "ends", "new", "passing"}
    for kernel_id in ("gone", "ends", "new", "passing"):
        await rig.reconciler.observe(kernel_id)
    assert rig.states == {"ends": "terminated", "new": "running"}


async def test_kernel_is_observed_when_its_lock_is_free(watched: Rig) -> None:
    watched.runtime.gate = asyncio.Event()
    creating = asyncio.create_task(watched.create())
    await settled(watched, "k1", "creating")
    for _ in range(3):
        watched.reconciler.requeue("k1")
    await asyncio.sleep(0)
    assert watched.states == {"k1": "creating"}
    watched.runtime.gate.set()
    assert (await creating).state is KernelState.RUNNING


async def test_create_during_an_observation_is_not_overwritten(rig) -> None:
    """The kernel of another create, found late under the same name, is looked at again."""
    await rig.create("k2")
    stranger = replace(rig.runtime.kernels["k2"], kernel_id="k1", handle="77")
    find = rig.runtime.find

    async def slow(ref: KernelRef):
        rig.runtime.find = find
        rig.runtime.gate = asyncio.Event()
        rig.late = asyncio.create_task(rig.create("k1", cuda_device=1))
        await settled(rig, "k1", "preparing")
        return stranger

    rig.runtime.find = slow
    await rig.reconciler.observe("k1")
    await settled(rig, "k1", "creating")
    assert rig.reconciler._queued == {"k1"}
    rig.runtime.gate.set()
    assert (await rig.late).handle != "77"


async def test_what_never_ran_is_looked_at_again_before_it_is_removed(rig: Rig) -> None:
    """A list is out of date by the time that its removals begin."""
    await rig.create("k1", cuda_device=1)
    running = rig.runtime.kernels["k1"]
    after = Rig()
    after.runtime.kernels["k1"] = running
    stale = replace(running, state=ObservedState.CREATED)
    after.runtime.list_kernels = AsyncMock(return_value=Listing((stale,)))
    await after.relist()
    assert after.states == {"k1": "running"}
    assert after.runtime.kernels == {"k1": running}


async def test_kernel_recreated_during_a_list_is_not_overwritten(rig: Rig) -> None:
    await rig.create("k1", cuda_device=1)
    before = Listing(tuple(rig.runtime.kernels.values()))

    async def slow() -> Listing:
        await rig.service.remove("k1")
        await rig.create("k1", cuda_device=2)
        return before

    rig.runtime.list_kernels = slow
    await rig.relist()
    assert rig.free_gpus == 0
    assert rig.state.kernel("k1").handle == rig.runtime.kernels["k1"].handle


async def test_one_runtime_that_hangs_keeps_no_other_from_being_listed(rig: Rig) -> None:
    hung = FakeRuntime()
    hung.name, hung.list_kernels = "hung", asyncio.Event().wait
    both = Rig(None, "hung")
    both.runtimes["hung"] = hung
    both.reconciler._first_lists["hung"] = asyncio.Event()
    both.reconciler._watched_runtimes.add("hung")
    for name in ("fake", "hung"):
        both.state.mark_unavailable(name, "down")
    retrying = asyncio.create_task(both.reconciler.retry())
    await until(lambda: both.state.runtime("fake").state is RuntimeState.AVAILABLE, within_s=5)
    retrying.cancel()


async def test_events_that_a_library_cancels_are_followed_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation that nobody asked for would end the loop without a word."""
    monkeypatch.setattr("agentd.services.kernels.reconciler.FIRST_PAUSE_S", 0.0)
    follow, breaks = rig.runtime.watch_events, [asyncio.CancelledError()]

    async def following():
        if breaks:
            raise breaks.pop()
        async for kernel_id in follow():
            yield kernel_id

    rig.runtime.watch_events = following
    async with running(rig):
        assert breaks == []


async def test_observation_that_a_library_cancels_is_repeated(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentd.services.kernels.reconciler.MAX_PAUSE_S", 0.0)
    await rig.create()
    find, breaks, is_found = rig.runtime.find, [asyncio.CancelledError()], asyncio.Event()

    async def finding(ref: KernelRef) -> ObservedKernel | None:
        if breaks:
            raise breaks.pop()
        is_found.set()
        return await find(ref)

    rig.runtime.find = finding
    async with running(rig), asyncio.timeout(10):
        rig.reconciler.requeue("k1")
        await is_found.wait()


async def test_kernel_removed_before_its_turn_is_not_looked_for(rig: Rig) -> None:
    await rig.create()
    rig.reconciler.requeue("k1")
    await rig.service.remove("k1")
    looked_for = []
    rig.runtime.find = looked_for.append
    await rig.reconciler.observe(await rig.reconciler.wait_next())
    assert looked_for == []


async def test_removed_kernel_is_looked_for_after_a_second_event(rig: Rig) -> None:
    created = await rig.create()
    rig.reconciler.requeue("k1")
    rig.reconciler.requeue("k1")
    found = rig.runtime.kernels["k1"]
    await rig.service.remove("k1")
    rig.runtime.kernels["k1"] = replace(found, handle="made-by-hand")
    await rig.reconciler.observe(await rig.reconciler.wait_next())
    assert rig.states == {"k1": "running"}
    assert rig.state.kernel("k1").handle != created.handle
