"""Random operations on claims and kernels by two teams, under deaths of the daemon."""

import asyncio
import random
import time

import pytest

from crash.claim_model import TEAMS
from crash.random_claims import Driver
from support.checked_node import SEED, SOAK_S, CheckedNode

BRIEF_S = 20.0
STEPS = 6
"""Steps between two comparisons."""


@pytest.mark.long
@pytest.mark.timeout(300 + 2 * SOAK_S)
async def test_random_operations_leak_and_double_nothing(process_node: CheckedNode) -> None:
    node, chance = process_node, random.Random(SEED)
    driver = Driver(node, chance)
    end, steps, rounds = time.monotonic() + (SOAK_S or BRIEF_S), 0, 0
    try:
        await driver.start()
        while time.monotonic() < end:
            for _ in range(STEPS):
                steps += 1
                choice = chance.random()
                if choice < 0.05:
                    await driver.toggle_drain()
                elif choice < 0.3:
                    await asyncio.gather(*map(driver.run_operation, TEAMS))
                else:
                    await driver.run_operation(chance.choice(TEAMS))
            if chance.random() < 0.2:
                await driver.die()
            await driver.verify()
            rounds += 1
        await driver.release_everything()
    finally:
        driver.close()
    print(f"\nseed {SEED}: {steps} steps, {node.deaths} deaths, {rounds} comparisons")
    print(dict(sorted(driver.answers.items())))
    assert "Traceback" not in node.daemon.log
