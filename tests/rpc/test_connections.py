"""Who queues, queues in order, and leaves room for whoever does not."""

import asyncio

from agentd.rpc.connections import Newcomers, Turns


async def test_one_request_begins_in_each_round_of_the_loop_and_in_order() -> None:
    turns, begun, rounds = Turns(), [], []

    async def request(number: int) -> None:
        await turns.wait()
        begun.append(number)

    waiting = [asyncio.create_task(request(number)) for number in range(50)]
    while not all(task.done() for task in waiting):
        before = len(begun)
        await asyncio.sleep(0)
        rounds.append(len(begun) - before)
    assert begun == list(range(50))
    assert max(rounds) == 1


async def test_who_gives_up_while_it_queues_holds_nobody_up() -> None:
    turns = Turns()
    waiting = [asyncio.create_task(turns.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting[:2]:
        task.cancel()
    async with asyncio.timeout(5):
        await waiting[2]
    await turns.wait()


async def test_a_stop_waits_for_whom_it_let_in_but_not_for_ever() -> None:
    newcomers = Newcomers()
    await newcomers.heard(60)
    newcomers.add("asks")
    newcomers.add("hangs up")
    waiting = asyncio.create_task(newcomers.heard(60))
    for connection in ("asks", "hangs up"):
        await asyncio.sleep(0.01)
        assert not waiting.done()
        newcomers.discard(connection)
    async with asyncio.timeout(5):
        await waiting
    newcomers.add("says nothing")
    async with asyncio.timeout(5):
        await newcomers.heard(0.01)
