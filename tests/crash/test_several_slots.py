"""Dying on a node whose GPUs have two slots; the memory is switched off and on between lives."""

import random
from collections import Counter

import pytest

from crash.test_deaths_at_failpoints import A_DAY_S, Sweep, asked_of, at_start_of
from support.checked_node import SEED, SOAK_S, CheckedNode, until_soak_ends
from support.daemon import AGENTS
from support.registry import Registry

GIB = 2**30
REQUESTS = (
    {"cuda.mem": "20g"},
    {"cuda.shares": "0.25"},
    {"cuda.shares": "0.1", "cuda.mem": "30g"},
    {"cuda.mem": "100g"},
)
RESIDENTS = {
    "agent-1": ({"cuda.shares": "0.25", "cuda.mem": "40g"}, 40 * GIB),
    "agent-2": ({"cuda.mem": "8g"}, 8 * GIB),
}
"""The request of each agent's resident, and the memory that it holds."""
LIVES = 4
OF_KERNELS = ("intent", "record", "create", "shim", "stop", "delete", "reconcile")


def config(*, has_memory: bool) -> str:
    return (
        f'[plugins]\nallow = ["sim"]\n{AGENTS}[plugins.cuda]\nplugin = "sim"\ncount = 4\n'
        f'mode = "shares"\nmemory = "80g"\nmemory-slot = {str(has_memory).lower()}\n'
    )


class TwoSlots(Sweep):
    """A sweep over requests of two slots; the memory is switched at each death."""

    has_memory = True

    async def residents(self) -> None:
        for agent, (slots, _) in RESIDENTS.items():
            body = {"kernel_id": f"resident-{agent}", "slots": small(slots)}
            await self.daemon.running(agent, **body, command=["sleep", A_DAY_S])
        self.lives = self.node.live_commands()

    def body(self, point: str) -> dict:
        asked = [slots for slots in REQUESTS if self.has_memory or "cuda.mem" not in slots]
        return super().body(point) | {"slots": small(asked[self._number % len(asked)])}

    async def provoke(self, point: str, kernel_id: str) -> set[str]:
        touched = await super().provoke(point, kernel_id)
        self.has_memory = not self.has_memory
        self.daemon.configure(config(has_memory=self.has_memory))
        return touched

    async def same_again(self, kernel_id: str) -> None:
        await super().same_again(kernel_id)
        await self.charged()

    async def charged(self) -> None:
        """Fail unless residents hold what they did, and sums are those of all holders."""
        for agent, (_, memory) in RESIDENTS.items():
            kernel = await self.daemon.get(f"/v1/kernels/resident-{agent}")
            unknown = {} if self.has_memory else {"cuda.mem": str(memory)}
            assert kernel["unknown_slots"] == unknown
            assert ("cuda.mem" in kernel["allocation"]["cuda"]) == self.has_memory
        held: Counter[str] = Counter()
        for device in await self.daemon.get("/v1/devices"):
            for holder in device["holders"]:
                held[holder["kernel_id"]] += int(holder["amounts"].get("cuda.mem", 0))
            if device["device_name"] == "cuda":
                assert ("cuda.mem" in device["slots"]) == self.has_memory
            if memory := device["slots"].get("cuda.mem"):
                amounts = [int(holder["amounts"]["cuda.mem"]) for holder in device["holders"]]
                assert int(memory["allocated"]) == sum(amounts) <= int(memory["capacity"])
        for agent, (_, memory) in RESIDENTS.items():
            assert held[f"resident-{agent}"] == memory


def small(slots: dict) -> dict:
    return slots | {"cpu": 0, "mem": "16m"}


def lives(chance: random.Random) -> list[tuple[str, str]]:
    """Return a few points of a kernel's life, each with one of the start after it."""
    asked = [p for p in asked_of("process") if p.partition(".")[0] in OF_KERNELS]
    seconds = [p for p in at_start_of("process") if "discard" not in p]
    count = len(asked) if SOAK_S else LIVES
    return [(point, chance.choice(["", *seconds])) for point in chance.sample(asked, count)]


@pytest.mark.long
@pytest.mark.needs("cgroups")
@pytest.mark.timeout(100 + 2 * SOAK_S)
async def test_death_with_two_slots_loses_no_amount(
    process_node: CheckedNode, registry: Registry
) -> None:
    sweep = TwoSlots(process_node, registry)
    assert await process_node.start(text=config(has_memory=True))
    await sweep.residents()
    await process_node.kill()
    for point, second in until_soak_ends(lives(random.Random(SEED)), SOAK_S):
        await sweep.life(point, second)
    await process_node.start()
    await process_node.remove_kernels_except(*sweep.lives)
    await process_node.check()
    await sweep.charged()
