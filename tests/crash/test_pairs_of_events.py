"""Pairs of events on a node, checked from three sides.

Two kernels run and report their identity on request, and a process holds a claim. After every pair
of events agentd's records, the host's state and the kernels' reports must agree, and all free
resources can be allocated.
"""

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from agentd.core.invariants import NodeSnapshot
from support.checked_node import SEED, SOAK_S, CheckedNode, until_soak_ends
from support.daemon import BASE, Daemon, signal_and_wait
from support.engine import Engine
from support.waiting import until

PARTS = 4
"""The number of tests that share the pairs."""
SAMPLE = 11
EX_CONFIG = 78
CLAIMED = "GPU-c"
"""The device of the claim."""
SCRIPT = """
n=0
say() { n=$((n+1)); echo "beat $n $CUDA_VISIBLE_DEVICES $(grep Cpus.*list /proc/self/status)"; }
trap say USR1
trap 'exit 3' USR2
echo ready
while :; do sleep 0.05; done
"""


@dataclass
class Setup:
    """The members of the configuration; one event changes each."""

    mode: str = "shared"
    agents: tuple[str, ...] = ("agent-1", "agent-2")
    devices: tuple[str, ...] = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    swapped: bool = False
    slots: str = "device"
    fault: str = ""
    plugins: tuple[str, ...] = ("cuda",)
    reserved: str = "0"
    memory: str = "8g"
    boot: str = ""

    def text(self) -> str:
        parts = {"agent-1": ["cuda0", "cuda2"], "agent-2": ["cuda1", "cuda3"]}
        if self.swapped:
            parts = {"agent-1": parts["agent-2"], "agent-2": parts["agent-1"]}
        agents = "".join(
            f'[[agents]]\nid = "{agent}"\n'
            + (
                f'[agents.resource]\ncpu = 3\nmem = "45%"\ndevices = {{ cuda = {parts[agent]} }}\n'
                if self.mode == "manual"
                else ""
            )
            for agent in self.agents
        )
        listed = ", ".join(
            f'{{ id = "cuda{n}", stable-id = "{name}" }}' for n, name in enumerate(self.devices)
        )
        tables = {
            "cuda": f'[plugins.cuda]\nplugin = "sim"\ndevices = [{listed}]\n'
            f'mode = "{self.slots}"\n{self.fault}\n',
            "tpu": '[plugins.tpu]\nplugin = "sim"\ncount = 2\n',
        }
        return (
            f'[resource]\nallocation-mode = "{self.mode}"\nreserved-cpu = {self.reserved}\n'
            f'[plugins]\nallow = ["sim"]\nopen-timeout = 3\ncall-timeout = 1\n{agents}'
            + "".join(tables[name] for name in self.plugins)
        )


@dataclass
class Scene:
    """One node through a pair of events."""

    node: CheckedNode
    chance: random.Random
    setup: Setup = field(default_factory=Setup)
    ended: dict[str, set[int | None]] = field(default_factory=dict)
    beats: dict[str, list[str]] = field(default_factory=dict)
    is_stale: bool = False
    is_claimed: bool = False
    claimants: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def daemon(self) -> Daemon:
        return self.node.daemon

    def change(self, **fields: Any) -> None:
        """Change the configuration; the next start, or event that needs one, reads it."""
        for name, value in fields.items():
            setattr(self.setup, name, value)
        self.is_stale = True

    async def up_to_date(self) -> None:
        if self.is_stale:
            await self.node.kill(self.chance.choice([signal.SIGTERM, signal.SIGKILL]))
            await self.start()

    async def start(self) -> None:
        self.is_stale = False
        base = BASE.replace('mem = "8g"', f'mem = "{self.setup.memory}"')
        self.daemon.configure(self.setup.text(), base)
        self.daemon.boot_id = self.setup.boot
        assert await self.node.start()

    async def begin(self) -> None:
        await self.start()
        for n in (1, 2):
            body = {"slots": {"cuda.device": 1, "cpu": 1, "mem": "64m"}}
            await self.daemon.running(
                f"agent-{n}", kernel_id=f"k{n}", command=["sh", "-c", SCRIPT], **body
            )
        claimant = subprocess.Popen(["sleep", "1000"])
        self.claimants.append(claimant)
        body = {"holder": {"pid": claimant.pid}, "devices": {"cuda": [CLAIMED]}}
        assert (await self.node.claim("c1", slots={"cuda.device": 1}, **body)).status == 201
        self.is_claimed = True
        self.lives = self.node.live_commands()
        for kernel_id in self.lives:
            await self.said(kernel_id, "(ready)")  # before, a signal would be lost, or end it
            self.beats[kernel_id] = [await self.beat(kernel_id, 1)]

    async def beat(self, kernel_id: str, number: int) -> str:
        """Return the identity and the request count that a kernel reports from the inside."""
        os.kill(self.lives[kernel_id][0], signal.SIGUSR1)
        return await self.said(kernel_id, f"beat {number} (.*)")

    async def said(self, kernel_id: str, line: str) -> str:
        """Wait for a line in a kernel's log."""
        logs = await until(
            lambda: self.daemon.call("GET", f"/v1/kernels/{kernel_id}/logs"),
            lambda logs: re.search(f"^{line}$".encode(), logs.content, re.MULTILINE),
            text=f"kernel {kernel_id} prints {line}",
        )
        return re.search(f"^{line}$", logs.content.decode(), re.MULTILINE)[1]

    def end_claimant(self) -> None:
        """End the process that holds the claim."""
        for claimant in self.claimants:
            claimant.kill()
            claimant.wait()
        self.is_claimed = False

    def end(self, kernel_id: str, number: int, *codes: int | None) -> None:
        """End a kernel if it runs; agentd may report one of these codes."""
        if kernel_id not in self.ended:
            signal_and_wait(self.lives[kernel_id][0], number)
            self.ended[kernel_id] = set(codes)


async def kernel_ends(scene: Scene) -> None:
    await scene.up_to_date()
    scene.end("k1", signal.SIGUSR2, 3)


async def kernel_is_killed(scene: Scene) -> None:
    await scene.up_to_date()
    scene.end("k2", signal.SIGKILL, 137)


async def claimant_is_killed(scene: Scene) -> None:
    scene.end_claimant()


async def claim_is_released(scene: Scene) -> None:
    await scene.up_to_date()
    answer = await scene.daemon.call("DELETE", "/v1/claims/c1")
    assert answer.status in ((204,) if scene.is_claimed else (204, 404))
    scene.is_claimed = False


async def agentd_is_terminated(scene: Scene) -> None:
    await scene.up_to_date()
    assert await scene.node.kill(signal.SIGTERM) == 0
    await scene.start()


async def agentd_is_killed(scene: Scene) -> None:
    await scene.up_to_date()
    await scene.node.kill()
    await scene.start()


async def engine_restarts(scene: Scene) -> None:
    await scene.up_to_date()
    engine = scene.node.engine
    assert engine is not None
    await asyncio.to_thread(engine.stop, scene.chance.choice([signal.SIGTERM, signal.SIGKILL]))
    await asyncio.to_thread(engine.start)


async def runtime_is_switched(scene: Scene) -> None:
    scene.daemon.runtime = "process" if scene.daemon.runtime == "docker" else "docker"
    scene.change()


async def node_id_changes(scene: Scene) -> None:
    """Refused while kernels of the old one live."""
    await scene.up_to_date()
    if len(scene.ended) == len(scene.lives):
        return
    await scene.node.kill()
    text = scene.daemon.config_file.read_text()
    scene.daemon.config_file.write_text(text.replace(scene.node.node_id, "another-node"))
    refused = scene.daemon.spawn()
    assert await asyncio.to_thread(refused.wait, 30) == EX_CONFIG
    await scene.start()


async def machine_reboots(scene: Scene) -> None:
    """End every kernel and the claim with their boot, and restart the engine."""
    await scene.up_to_date()
    await scene.node.kill()
    scene.end_claimant()
    for kernel_id, (pid, _) in scene.node.live_commands().items():
        if kernel_id not in scene.ended:
            scene.ended[kernel_id] = {None, 137}
        for process in scene.node.session_members(pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    scene.change(boot=f"{scene.chance.getrandbits(128):032x}")
    await scene.start()


CHANGES: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "plugin is removed": lambda s: {"plugins": tuple(p for p in s.plugins if p != "cuda")},
    "plugin is added": lambda s: {"plugins": ("tpu", *(p for p in s.plugins if p != "tpu"))},
    "plugin is broken": lambda _: {"fault": 'fault = "raise"\nfault-at = "open"'},
    "plugin hangs": lambda _: {"fault": 'fault = "hang"\nfault-at = "list"\nfault-after = 1'},
    "slot is renamed": lambda _: {"slots": "shares"},
    "device is gone": lambda s: {"devices": tuple(d for d in s.devices if d != "GPU-a")},
    "device order changes": lambda s: {"devices": s.devices[::-1]},
    "device moves to another agent": lambda _: {"mode": "manual", "swapped": True},
    "agent is removed": lambda _: {"agents": ("agent-1",)},
    "mode changes": lambda _: {"mode": "auto-split"},
    "reserved cores change": lambda _: {"reserved": '["0", "5"]'},
    "memory shrinks": lambda _: {"memory": "96m"},
}
"""Events that change the configuration."""
ACTIONS: tuple[Callable[[Scene], Awaitable[None]], ...] = (
    kernel_ends, kernel_is_killed, claimant_is_killed, claim_is_released, agentd_is_terminated,
    agentd_is_killed, engine_restarts, runtime_is_switched, node_id_changes, machine_reboots,
)  # fmt: skip
EVENTS = (*CHANGES, *ACTIONS)
Event = str | Callable[[Scene], Awaitable[None]]


async def happens(event: Event, scene: Scene) -> None:
    if isinstance(event, str):
        scene.change(**CHANGES[event](scene.setup))
    else:
        await event(scene)


async def three_views_agree(scene: Scene, before: NodeSnapshot) -> None:
    node, daemon = scene.node, scene.daemon
    allowed = {"capacity"} if scene.setup.memory != "8g" else set()
    for kernel_id in scene.ended:
        await daemon.until(kernel_id, "terminated")
    await claim_is_as_it_should(scene)
    await node.check(before, scene.ended, allowed=allowed)
    for kernel_id, codes in scene.ended.items():
        assert (await daemon.get(f"/v1/kernels/{kernel_id}"))["exit_code"] in codes
    alive = {k: who for k, who in scene.lives.items() if k not in scene.ended}
    assert node.live_commands() == alive
    for kernel_id in alive:
        said = scene.beats[kernel_id]
        said.append(await scene.beat(kernel_id, len(said) + 1))
        assert len(set(said)) == 1, said
    await everything_that_is_free(scene, allowed, before)


async def claim_is_as_it_should(scene: Scene) -> None:
    """Wait until the claim is listed and holds its device, or neither if it has ended."""
    ids, devices = ({"c1"}, [CLAIMED]) if scene.is_claimed else (set(), [])
    await until(scene.node.claim_ids, ids)
    held = [
        device["stable_id"]
        for device in await scene.daemon.get("/v1/devices")
        if any("claim_id" in holder for holder in device["holders"])
    ]
    assert held == devices


async def everything_that_is_free(scene: Scene, allowed: set[str], before: NodeSnapshot) -> None:
    """Give away all that can be had: nothing of it may be somebody's already."""
    node, daemon = scene.node, scene.daemon
    slot = f"cuda.{scene.setup.slots}"
    await daemon.runtime_is("available")
    given = 0
    for agent in scene.setup.agents:
        for _ in scene.setup.devices:
            body = {"slots": {slot: 1, "cpu": 0, "mem": "16m"}}
            answer = await daemon.create(agent, kernel_id=f"new-{given}", **body)
            assert answer.status in (201, 409, 422, 503)
            given += answer.status == 201
    await node.check(before, scene.ended, allowed=allowed)
    healthy = not scene.setup.fault and "cuda" in scene.setup.plugins
    if healthy and scene.setup.memory == "8g" and len(scene.setup.agents) == 2:
        free = len(scene.setup.devices) - scene.is_claimed - sum(
            1 for k, name in (("k1", "GPU-a"), ("k2", "GPU-b"))
            if k not in scene.ended and name in scene.setup.devices
        )  # fmt: skip
        assert given == free


def pairs(chance: random.Random) -> list[tuple[Event, Event]]:
    """Return all pairs, or a sample in which every event comes up."""
    everything = list(product(EVENTS, repeat=2))
    if SOAK_S:
        return chance.sample(everything, len(everything))
    shuffled = chance.sample(EVENTS, len(EVENTS))
    return list(zip(shuffled[::2], shuffled[1::2], strict=True))[:SAMPLE]


async def one_pair(scene: Scene, pair: tuple[Event, Event]) -> None:
    try:
        await scene.begin()
        before = await scene.node.check()
        for event in pair:
            await happens(event, scene)
            if scene.chance.random() < 0.5:
                await scene.up_to_date()
        await scene.up_to_date()
        await three_views_agree(scene, before)
        await scene.node.remove_kernels_except()
    finally:
        scene.end_claimant()
        await scene.daemon.close()


def pairs_of(runtime: str, part: int) -> list[tuple[Event, Event]]:
    """Return the pairs of one part."""
    return pairs(random.Random(f"{SEED}{runtime}"))[part::PARTS]


@pytest.mark.parametrize("runtime", ["process", "docker"])
def test_parts_cover_every_event(runtime: str) -> None:
    shared = [pair for part in range(PARTS) for pair in pairs_of(runtime, part)]
    assert set(shared) == set(pairs(random.Random(f"{SEED}{runtime}")))
    assert {event for pair in shared for event in pair} == set(EVENTS)


def names(pair: tuple[Event, Event]) -> str:
    return " and ".join(getattr(event, "__name__", event) for event in pair)


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.timeout(200 + 2 * SOAK_S)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("runtime", ["process", "docker"])
async def test_pair_of_events_keeps_three_views_equal(
    runtime: str, part: int, own_engine: Engine
) -> None:
    count, failed = 0, {}
    for pair in until_soak_ends(pairs_of(runtime, part), SOAK_S / PARTS):
        count += 1
        folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
        folder.chmod(0o755)
        chance = random.Random(f"{SEED}{runtime}{names(pair)}")
        try:
            await one_pair(Scene(CheckedNode(Daemon(folder, runtime, own_engine)), chance), pair)
        except Exception:  # noqa: BLE001 - the next pair is tried as well
            failed[names(pair)] = traceback.format_exc()
            print(f"\n{runtime}, seed {SEED}: {names(pair)}\n{failed[names(pair)]}")
        shutil.rmtree(folder)
    print(f"\n{runtime}, part {part}, seed {SEED}: {count} pairs, {len(failed)} failed")
    assert not failed, "\n".join(failed)
