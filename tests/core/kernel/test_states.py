"""The state machine: two tables, and nothing besides."""

import pytest
from msgspec.structs import replace

from agentd.core.kernel.adoption import adopt
from agentd.core.kernel.reconcile import MarkAbsent, reconcile
from agentd.core.kernel.states import (
    ENDED,
    LIVE,
    MOVES,
    OBSERVATIONS,
    STARTING,
    Kernel,
    KernelState,
    ObservedState,
)
from core.kernels import NODE, found

FINDS = {
    ObservedState.RUNNING: found(ObservedState.RUNNING),
    ObservedState.PAUSED: found(ObservedState.PAUSED),
    ObservedState.EXITED: found(ObservedState.EXITED),
    ObservedState.UNREADABLE: found(ObservedState.RUNNING, record="", device_label=""),
}


def kernel(state: KernelState) -> Kernel:
    return Kernel("k1", "a", state, "hash", 1.0, "fake", handle="c1")


@pytest.mark.parametrize("after", KernelState)
@pytest.mark.parametrize("before", KernelState)
def test_only_the_moves_of_the_table_are_legal(before: KernelState, after: KernelState) -> None:
    made = kernel(before)
    if after is before or after in MOVES[before]:
        assert made.moved_to(after).state is after
    else:
        with pytest.raises(ValueError, match="cannot"):
            made.moved_to(after)
        assert made.state is before


@pytest.mark.parametrize("sight", ObservedState)
@pytest.mark.parametrize("before", KernelState)
def test_observations_follow_the_table(before: KernelState, sight: ObservedState) -> None:
    made = kernel(before)
    if sight in OBSERVATIONS[before]:
        assert made.with_observation(sight).state is OBSERVATIONS[before][sight]
    else:
        with pytest.raises(ValueError, match="cannot be seen"):
            made.with_observation(sight)


@pytest.mark.parametrize("sight", FINDS)
@pytest.mark.parametrize("before", [state for state in KernelState if OBSERVATIONS[state]])
def test_reconcile_takes_every_edge_of_observations(
    before: KernelState, sight: ObservedState
) -> None:
    """A new handle means a new reading; the same handle keeps the first one."""
    known = replace(kernel(before), handle="another")
    actions = reconcile({"k1": known}, [FINDS[sight]], NODE)
    after = [action.kernel.state for action in actions]
    assert after == [OBSERVATIONS[before][sight]]


@pytest.mark.parametrize("before", [state for state in KernelState if OBSERVATIONS[state]])
def test_absence_is_an_edge_too(before: KernelState) -> None:
    known = kernel(before)
    actions = reconcile({"k1": known}, [], NODE, expired=["k1"])
    is_gone = before in (KernelState.FAILED, KernelState.LOST)
    assert actions == ([] if is_gone else [MarkAbsent("k1")])
    assert known.with_observation(ObservedState.ABSENT).state in ENDED


def test_every_state_is_reachable_and_only_ended_ones_stay() -> None:
    reached = {KernelState.PREPARING} | {after for moves in MOVES.values() for after in moves}
    reached |= {after for found in OBSERVATIONS.values() for after in found.values()}
    assert reached == set(KernelState)
    assert {state for state in KernelState if not MOVES[state]} == ENDED
    assert set(KernelState) == STARTING | LIVE | ENDED


def test_adopted_kernel_starts_in_the_state_after_a_create() -> None:
    assert adopt(found(ObservedState.CREATED), NODE).kernel.state is KernelState.CREATING
    assert adopt(found(), NODE).kernel.state is KernelState.RUNNING
