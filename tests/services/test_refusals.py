"""Refusals are kept for an hour, counted, and told."""

from agentd.errors import CommandNotFound, InsufficientResource, InvalidRequest, Problem
from agentd.events import Audit, EventKind, EventLog
from agentd.services.counts import NodeCounts
from agentd.services.refusals import MAX_DETAIL, MAX_KEPT, RETENTION_S, Refusals

NO_ROOM = InsufficientResource("cuda.device", "2", "1", (), limit="x" * 2 * MAX_DETAIL)


def create(
    kernel_id: str, *, caller: str = "a", action: str = "create_kernel", claim_id: str = ""
) -> Audit:
    return Audit(caller, "", None, action, "agent-1", kernel_id, "", claim_id)


async def test_they_are_counted_told_and_kept_for_an_hour() -> None:
    counts, events, now = NodeCounts(lambda: 0.0), EventLog(), [1000.0]
    refusals = Refusals(counts, events, lambda: now[0])
    with events.subscribe(None) as listener:
        refusals.record(create("k1", caller="team-a"), NO_ROOM)
        events.close()
        (event,) = [event async for event in listener.follow(1)]
    (kept,) = refusals.recent()
    assert (event.kind, event.value) == (EventKind.REFUSAL, kept)
    assert (kept.at, kept.caller, kept.agent_id) == (1000.0, "team-a", "agent-1")
    assert kept.code == "InsufficientResource"
    assert kept.detail.startswith("insufficient cuda.device: requested 2, 1 free")
    assert len(kept.detail) == MAX_DETAIL
    assert counts.refusals["InsufficientResource", "cuda.device"] == 1
    now[0] += RETENTION_S
    assert refusals.recent() == (kept,)
    now[0] += 0.1
    assert not refusals.recent()


def test_those_of_claims_are_not_counted_as_kernels() -> None:
    counts = NodeCounts(lambda: 0.0)
    refusals = Refusals(counts, EventLog(), lambda: 0.0)
    refusals.record(create("", action="create_claim", claim_id="c1"), NO_ROOM)
    (kept,) = refusals.recent()
    assert (kept.kernel_id, kept.claim_id, counts.refusals) == ("", "c1", {})


def test_a_flood_keeps_the_latest() -> None:
    refusals = Refusals(NodeCounts(lambda: 0.0), EventLog(), lambda: 0.0)
    for number in range(MAX_KEPT + 5):
        refusals.record(create(f"k{number}"), NO_ROOM)
    kept = refusals.recent()
    assert (len(kept), kept[0].kernel_id) == (MAX_KEPT, "k5")


async def test_refusal_keeps_nothing_that_only_its_caller_may_read() -> None:
    events = EventLog()
    refusals = Refusals(NodeCounts(lambda: 0.0), events, lambda: 0.0)
    with events.subscribe(None) as listener:
        refusals.record(create("k1"), InvalidRequest([Problem("env.SECRET", "is invalid")]))
        refusals.record(create("k2"), CommandNotFound("command 'SECRET': not found"))
        events.close()
        told = [event.value async for event in listener.follow(1)]
    assert [kept.detail for kept in refusals.recent()] == [
        "env: is invalid",
        "the command does not exist or is not executable",
    ]
    assert "SECRET" not in str(told)
