"""Records of kernels, while no runtime answers and after a restart."""

import pytest
from msgspec.structs import replace

from agentd.core.kernel.states import KernelState
from agentd.errors import (
    Conflict,
    KernelConflict,
    OutcomeUnknown,
    RuntimeUnavailable,
    UnknownRuntime,
)
from agentd.services.kernels.records import recorded_runtimes
from agentd.services.state import RuntimeState
from agentd.state.schemas import Phase, SavedRecord
from services.node import Rig
from support.damage import resealed


async def restarted(rig: Rig) -> Rig:
    """The next daemon, with the same memory, while the same runtime does not answer."""
    after = Rig(rig.memory)
    after.runtime.kernels = rig.runtime.kernels
    after.runtime.is_down = True
    after.recall()
    with pytest.raises(RuntimeUnavailable):
        await after.relist()
    return after


async def test_a_record_says_how_far_its_kernel_has_come(rig: Rig) -> None:
    await rig.create(cuda_device=1)
    assert rig.memory.records["k1"].phase is Phase.LIVE
    await rig.service.stop("k1", 0)
    assert rig.memory.records["k1"].phase is Phase.ENDED
    await rig.service.remove("k1")
    assert rig.memory.records == {}


async def test_interrupted_create_keeps_its_attempt(rig: Rig) -> None:
    rig.runtime.fail_create = RuntimeError("the answer is lost")
    spec = replace(rig.spec(), attempt="a")
    with pytest.raises(OutcomeUnknown):
        await rig.service.create(spec)
    after = await restarted(rig)
    with pytest.raises(OutcomeUnknown, match="retry later"):
        await after.service.create(spec)
    with pytest.raises(KernelConflict, match="another attempt"):
        await after.service.create(replace(spec, attempt="b"))


async def test_unreadable_record_holds_all_until_the_runtime_lists(rig) -> None:
    await rig.create(cuda_device=1)
    rig.memory.records["k1"] = SavedRecord("k1", Phase.LIVE, "{")
    after = await restarted(rig)
    assert after.states == {"k1": "unreadable"}
    assert after.free_gpus == 0
    after.runtime.is_down = False
    await after.reconciler.retry()
    assert after.states == {"k1": "running"}
    assert after.free_gpus == 1


async def test_a_create_that_failed_is_not_remembered(rig: Rig) -> None:
    rig.runtime.fail_create = RuntimeUnavailable("down")
    await rig.service.create(rig.spec(), wait=False)
    with pytest.raises(RuntimeUnavailable):
        await rig.create("k2")
    assert rig.memory.records == {}


async def test_a_runtime_is_forgotten_only_while_it_does_not_answer(rig: Rig) -> None:
    await rig.create(cuda_device=2)
    with pytest.raises(Conflict, match="runtime fake is available"):
        await rig.reconciler.forget_runtime("fake")
    with pytest.raises(UnknownRuntime):
        await rig.reconciler.forget_runtime("none")
    rig.runtime.is_down = True
    async with rig.state.kernel_lock("k1"):
        with pytest.raises(Conflict, match="operations in progress on k1"):
            await rig.reconciler.forget_runtime("fake")
    await rig.reconciler.forget_runtime("fake")
    assert (rig.states, rig.free_gpus, rig.memory.records) == ({}, 2, {})
    rig.runtime.is_down = False
    with pytest.raises(RuntimeUnavailable):
        await rig.create("k2", cuda_device=2)
    await rig.reconciler.retry()
    assert rig.states == {"k1": "running"}


async def test_unconfigured_runtime_can_be_forgotten(rig: Rig) -> None:
    await rig.create(cuda_device=1)
    text = resealed(rig.memory.records["k1"].text, runtime="old")
    after = Rig(rig.memory, "old")
    rig.memory.records["k1"] = SavedRecord("k1", Phase.LIVE, text)
    assert recorded_runtimes(rig.memory.load_records()) == {"old"}
    after.recall()
    await after.relist()
    after.state.mark_unavailable("old", "the runtime is not configured")
    assert after.states == {"k1": "running"}
    assert after.free_gpus == 1
    assert (await after.create("k2", cuda_device=1)).state is KernelState.RUNNING
    with pytest.raises(RuntimeUnavailable, match="runtime old is not configured"):
        await after.service.remove("k1")
    await after.reconciler.forget_runtime("old")
    assert after.states == {"k2": "running"}
    assert after.memory.runtimes == ["fake"]


async def test_an_outcome_that_is_not_known_is_remembered_as_an_intent(rig: Rig) -> None:
    rig.runtime.fail_create = OutcomeUnknown("lost")
    with pytest.raises(OutcomeUnknown):
        await rig.create(cuda_device=1)
    assert rig.memory.records["k1"].phase is Phase.INTENT
    after = await restarted(rig)
    assert after.states == {"k1": "creating"}
    assert after.state.runtime("fake").state is RuntimeState.UNAVAILABLE
    with pytest.raises(KernelConflict, match="unresolved"):
        await after.service.remove("k1")
