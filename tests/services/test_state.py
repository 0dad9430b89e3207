"""One state: kernels and ledger in step, revisions, locks, and how runtimes do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentd.core.allocation.ledger import Allocation, Share
from agentd.core.allocation.ports import Port
from agentd.core.claim.claim import Claim, NameHolder
from agentd.core.devices import DeviceId
from agentd.core.kernel.states import Kernel, KernelSpec, KernelState
from agentd.core.labels import MAX_AGENT_BYTES
from agentd.core.slots import ONE, SlotKind
from agentd.errors import UnknownKernel
from agentd.events import EventLog
from agentd.services.state import NodeState, RuntimeState

GPU = Share(DeviceId("cuda", "cuda0"), "GPU-0", "cuda.device", SlotKind.COUNT, ONE)


def kernel(kernel_id: str = "k1", state: KernelState = KernelState.RUNNING, **fields) -> Kernel:
    held = Allocation((GPU,))
    return Kernel(kernel_id, "a", state, "hash", 1.0, "fake", allocation=held, **fields)


@pytest.fixture
def state() -> NodeState:
    return NodeState(["fake", "other"], EventLog())


@given(st.lists(st.tuples(st.sampled_from(["k1", "k2"]), st.sampled_from([*KernelState, None]))))
def test_kernels_and_ledger_are_always_in_step(changes) -> None:
    state = NodeState(["fake"], EventLog())
    for kernel_id, now in changes:
        if now is None:
            state.drop_kernel(kernel_id)
        else:
            state.put_kernel(kernel(kernel_id, now, ports=(Port(80, 8000),)))
        holding = {k.kernel_id for k in state if k.holds_devices}
        assert state.ledger.holdings.keys() == holding
        assert set(state.ports.values()) <= holding
        assert bool(state.ports) == bool(holding)


def test_callbacks_get_every_change_after_it_was_made(state: NodeState) -> None:
    heard = []
    state.subscribe(lambda before, now: heard.append((before, now, len(state.kernels))))
    first, second = kernel(), kernel(state=KernelState.TERMINATED)
    state.put_kernel(first)
    state.put_kernel(second)
    state.drop_kernel("k1")
    state.drop_kernel("k1")
    assert heard == [(None, first, 1), (first, second, 1), (second, None, 0)]
    with pytest.raises(UnknownKernel):
        state.kernel("k1")


async def test_events_say_whether_what_is_held_has_changed() -> None:
    events = EventLog()
    state = NodeState(["fake"], events)
    lost, again = KernelState.LOST, KernelState.RUNNING
    with events.subscribe(None) as listener:
        for now in (
            KernelState.PREPARING,
            KernelState.RUNNING,
            KernelState.TERMINATED,
            lost,
            again,
        ):
            state.put_kernel(kernel(state=now))
        state.put_kernel(replace(kernel(), allocation=Allocation(())))
        state.drop_kernel("k1")
        events.close()
        told = [event.changes_shares async for event in listener.follow(1) if event is not None]
    assert told == [True, False, True, False, True, True, True]


async def test_what_was_seen_counts_only_if_nothing_happened_meanwhile(state: NodeState) -> None:
    for name in ("same", "changed", "gone", "busy"):
        state.put_kernel(kernel(name))
    since = state.snapshot()
    assert all(state.is_unchanged(name, since) for name in ("same", "changed", "never"))
    state.put_kernel(kernel("changed", KernelState.STOPPING))
    state.put_kernel(kernel("new"))
    async with state.kernel_lock("busy"):
        assert not state.is_unchanged("busy", since)
    assert state.is_unchanged("busy", since)
    assert state.is_unchanged("never", since)
    state.drop_kernel("gone")
    unchanged = [n for n in ("same", "changed", "gone", "new") if state.is_unchanged(n, since)]
    assert unchanged == ["same"]
    assert not state.is_unchanged("never", since), "it may be the one that came and went"


async def test_a_change_of_a_runtime_s_state_is_told_once(state: NodeState) -> None:
    with state._events.subscribe(None) as listener:
        for reason in ("down", "still down"):
            state.mark_unavailable("fake", reason)
        state.mark_available("fake")
        state._events.close()
        told = [event.value.state async for event in listener.follow(1)]
    assert told == [RuntimeState.UNAVAILABLE, RuntimeState.AVAILABLE]


def test_a_name_that_two_runtimes_have_is_the_first_one_s(state: NodeState) -> None:
    state.put_kernel(kernel())
    assert state.is_duplicate_id("k1", "other")
    assert not state.is_duplicate_id("k1", "fake")
    assert not state.is_duplicate_id("k2", "other")
    state.put_kernel(replace(kernel(), agent_id=""))
    assert not state.is_duplicate_id("k1", "other"), (
        "whose it is was a guess: its record is unreadable"
    )


def test_labels_of_what_has_ended_do_not_count(state: NodeState) -> None:
    large = {"a": "x" * (MAX_AGENT_BYTES - 1)}
    one = {"a": ""}
    claim = Claim("c1", "a", NameHolder("n"), "hash", 1.0, "boot", labels=large)
    labelled = KernelSpec("k2", "a", (), "hash", labels=one)

    def fits() -> bool:
        return state.label_excess(labelled) is None

    assert fits()
    state.put_kernel(kernel(labels=large))
    assert not fits()
    assert state.label_excess(KernelSpec("k2", "b", (), "hash", labels=one)) is None
    state.put_kernel(kernel(state=KernelState.TERMINATED, labels=large))
    assert fits()
    state.put_kernel(kernel(labels=large))
    state.drop_kernel("k1")
    assert fits()
    state.put_claim(claim)
    state.put_claim(replace(claim, boot_id="other"))
    assert not fits()
    state.drop_claim("c1")
    state.drop_claim("c1")
    assert fits()
