"""Claims under deaths of the daemon: whole or not at all, and never two holders of a device."""

import asyncio
import random
import signal
import time

import pytest

from crash.points import POINTS
from support.checked_node import NO_ANSWER, ONE, SEED, SOAK_S, CheckedNode
from support.daemon import AGENTS, gpus

NODE = '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(8)
CLAIMS = 100_000 if SOAK_S else 2_000
POINTS_OF_CLAIMS = [point for point in POINTS if point.startswith("claim.")]
AFTER_RECORD = {"claim.after_replace", "claim.before_drop"}
"""Points at which the record of a claim is in its place."""


@pytest.mark.parametrize("point", POINTS_OF_CLAIMS)
async def test_claim_is_whole_or_absent_after_a_death(
    process_node: CheckedNode, point: str
) -> None:
    node = process_node
    await node.start(f"{point}=kill", NODE)
    await node.claim("c1")
    await node.release("c1")
    assert await node.wait_killed() == -signal.SIGKILL
    assert await node.start()
    await node.check()
    assert await node.claim_ids() == ({"c1"} if point in AFTER_RECORD else set())
    assert (await node.claim("c1")).status == (200 if point in AFTER_RECORD else 201)
    await node.release("c1")
    assert await node.daemon.free("cuda.device") == "8"


@pytest.mark.parametrize(
    ("point", "keeps"),
    [
        ("claim.before_drop", False),
        ("claim.after_drop", False),
        ("record.before_move", False),
        ("record.before_move", True),
    ],
)
async def test_create_from_claim_charges_once_after_a_death(
    process_node: CheckedNode, point: str, keeps: bool
) -> None:
    node = process_node
    await node.start(f"{point}=kill", NODE)
    await node.claim("c1", slots={"cuda.device": 2})
    body = {"claim": "c1", **({"keep_claim": True} if keeps else {})}
    assert await node.create("k1", slots=ONE, **body) is NO_ANSWER
    await node.wait_killed()
    assert await node.start()
    await node.daemon.until("k1", "running")
    await node.check()
    assert await node.claim_ids() == ({"c1"} if keeps else set())
    assert await node.daemon.free("cuda.device") == ("6" if keeps else "7")


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
async def test_claim_fails_at_every_step_and_leaves_nothing(
    process_node: CheckedNode, error: str
) -> None:
    node = process_node
    armed = ";".join(f"{point}=1*error({error})" for point in POINTS_OF_CLAIMS)
    await node.start(armed, NODE)
    statuses = []
    for _ in range(len(POINTS_OF_CLAIMS)):
        statuses.append((await node.claim("c1")).status)
        if statuses[-1] == 201:
            break
        await node.check()
    assert statuses[-1] == 201
    assert set(statuses[:-1]) <= {500, 503}
    while (answer := await node.release("c1")).status != 204:
        assert answer.status == 503
        assert await node.claim_ids() == {"c1"}
    await node.check()
    assert await node.daemon.free("cuda.device") == "8"


@pytest.mark.long
@pytest.mark.timeout(300 + 2 * SOAK_S)
async def test_random_kills_leak_no_claim_and_give_no_device_twice(
    process_node: CheckedNode,
) -> None:
    node, chance = process_node, random.Random(SEED)
    assert await node.start(text=NODE)
    done, number, held = 0, 0, set()
    end = time.monotonic() + (SOAK_S or 150)
    while done < CLAIMS and time.monotonic() < end:
        until = done + chance.randrange(100, 800)
        while done < until and done < CLAIMS:
            if held and (len(held) == 8 or chance.random() < 0.5):
                claim_id = chance.choice(sorted(held))
                assert (await node.release(claim_id)).status == 204
                held.discard(claim_id)
            else:
                number += 1
                body = {"holder": {"ttl": 600}} if chance.random() < 0.1 else {}
                assert (await node.claim(f"c{number}", **body)).status == 201
                held.add(f"c{number}")
            done += 1
        dying = asyncio.create_task(node.claim("dying"))
        await asyncio.sleep(0)
        await node.kill()
        await dying
        assert await node.start()
        await node.release("dying")
        await node.check()
        assert await node.claim_ids() == held
    for claim_id in held:
        await node.release(claim_id)
    assert await node.daemon.free("cuda.device") == "8"
    assert not list((node.daemon.folder / "state/claims").iterdir())
    print(f"\n{done} claims and releases, {node.deaths} deaths, seed {SEED}")
