"""Counters of creates."""

import pytest

from agentd.errors import AgentdError, CommandNotFound, RuntimeFailure
from agentd.services.counts import CREATED, FAILED, REFUSED, Histogram, NodeCounts
from services.node import Rig


def counting(rig: Rig) -> NodeCounts:
    counts = NodeCounts(rig.clock.steady)
    rig.state.subscribe(counts.on_kernel_change)
    return counts


async def test_a_create_that_runs_is_one_with_its_time(rig: Rig) -> None:
    counts = counting(rig)
    await rig.create()
    await rig.create()
    await rig.service.remove("k1", 0)
    assert counts.creates == {("a", CREATED): 1}
    counted = [dict(each.cumulated()[0])["+Inf"] for each in counts.durations.values()]
    assert counted == [1, 1]


@pytest.mark.parametrize("error", [RuntimeFailure("disk"), CommandNotFound("x")])
async def test_a_create_that_fails_is_no_refusal_but_has_a_reason(
    rig: Rig, error: AgentdError
) -> None:
    counts = counting(rig)
    rig.runtime.fail_create = error
    with pytest.raises(type(error)):
        await rig.create()
    counts.count_refusal("a", "k1", error)
    assert counts.creates == {("a", FAILED): 1}
    assert counts.refusals == {(error.code, ""): 1}
    counts.count_refusal("a", "k1", error)
    assert counts.creates == {("a", FAILED): 1, ("a", REFUSED): 1}


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram()
    for seconds in (0.0005, 0.001, 0.3, 1000):
        histogram.add(seconds)
    bounds, sum_s = histogram.cumulated()
    counted = dict(bounds)
    assert (counted["0.001"], counted["0.25"], counted["0.5"], counted["+Inf"]) == (2, 2, 3, 4)
    assert sum_s == pytest.approx(1000.3015)
