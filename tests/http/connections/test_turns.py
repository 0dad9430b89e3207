"""Turns: what a caller is served, in which round of the event loop."""

import asyncio
from collections.abc import Hashable

import pytest

from agentd.http.connections.turns import CEILINGS, ROUNDS, Kind, Turns


async def rounds_of(turns: Turns, asked: list[Hashable], kind: Kind, amount: int = 1):
    """Ask at once; return the callers that were served in each round."""
    served: list[list[Hashable]] = [[]]

    async def ask(caller: Hashable) -> None:
        await turns.wait(caller, kind, amount)
        served[-1].append(caller)

    tasks = [asyncio.create_task(ask(caller)) for caller in asked]
    while not all(task.done() for task in tasks):
        served.append([])
        await asyncio.sleep(0)
    return served


@pytest.mark.parametrize("kind", Kind)
async def test_a_caller_gets_one_turn_in_any_rounds(kind: Kind) -> None:
    rounds = await rounds_of(Turns(), ["a"] * (5 * CEILINGS[kind]), kind)
    for start in range(len(rounds)):
        window = rounds[start : start + ROUNDS - 1]
        assert sum(map(len, window)) <= CEILINGS[kind]


async def test_one_turn_begins_in_each_round_in_the_order_of_arrival() -> None:
    callers = list(range(50))
    rounds = await rounds_of(Turns(), callers, Kind.REQUESTS)
    assert max(map(len, rounds)) == 1
    assert [caller for served in rounds for caller in served] == callers


async def test_a_newcomer_does_not_queue_behind_one_callers_requests() -> None:
    rounds = await rounds_of(Turns(), ["flood"] * 50 + ["other"], Kind.REQUESTS)
    first = next(number for number, served in enumerate(rounds) if "other" in served)
    assert first <= 4


async def test_amount_within_a_turn_does_not_wait() -> None:
    turns = Turns()
    assert all(turns.take("a", Kind.FRAMES) for _ in range(CEILINGS[Kind.FRAMES]))
    assert not turns.take("a", Kind.FRAMES)


async def test_more_than_a_turn_is_one_turn() -> None:
    turns = Turns()
    async with asyncio.timeout(5):
        for _ in range(3):
            await turns.wait("a", Kind.WRITTEN, 10 * CEILINGS[Kind.WRITTEN])


async def test_abandoned_wait_delays_no_other_caller() -> None:
    turns = Turns()
    waiting = [asyncio.create_task(turns.wait("a", Kind.REQUESTS)) for _ in range(4)]
    await asyncio.sleep(0)
    for task in waiting[1:3]:
        task.cancel()
    async with asyncio.timeout(5):
        await waiting[3]


async def test_failed_grant_delays_no_other_caller() -> None:
    turns = Turns()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)

    def fail() -> bool:
        raise ValueError

    await turns.wait("a", Kind.REQUESTS)
    turns.queue("a", Kind.REQUESTS, 1, fail)
    async with asyncio.timeout(5):
        await turns.wait("a", Kind.REQUESTS)


async def test_turns_are_forgotten_once_all_are_served() -> None:
    turns = Turns()
    await turns.wait("a", Kind.REQUESTS)
    for _ in range(ROUNDS + 1):
        await asyncio.sleep(0)
    assert not turns._is_counting
    assert not turns._turns
