"""Dying at every point, starting again, and dying once more inside the recovery.

One node lives through all of it: each life has a point set, at which it dies over what is
asked of it, and the next one dies at a point of its start. Two kernels live through it all.
"""

import os
import random
import signal
import subprocess
from collections.abc import Callable
from difflib import unified_diff
from itertools import product
from pathlib import Path

import pytest

from agentd.core.kernel.plan import kernel_name
from crash.points import POINTS
from crash.states import left_behind, states_of
from support.checked_node import (
    NO_ANSWER,
    ONE,
    SEED,
    SETTLE_TIMEOUT_S,
    SOAK_S,
    CheckedNode,
    start_time,
    until_soak_ends,
)
from support.daemon import AGENTS, Daemon, gpus
from support.engine import Engine, rootfs
from support.registry import Registry
from support.waiting import until

PARTS = 3
"""The number of tests that share the lives; each has a node of its own."""
NODE = (
    '[resource]\nallocation-mode = "auto-split"\n'
    'engine-devices = { test = { cuda = ["cuda31"] } }\n[plugins]\nallow = ["sim"]\n'
    + AGENTS
    + gpus(32)
)
AT_START = (
    *(p for p in POINTS if p.split(".")[0] in ("start", "devices", "node", "adopt")),
    "plugin.before_spawn",
    "plugin.after_spawn",
    "plugin.after_load",
    "plugin.after_open",
    "plugin.after_list",
)
INTENDED = {
    *(p for p in POINTS if p.startswith(("create.", "shim.")) and not p.endswith("_exit")),
    *("intent.after_replace", "record.before_move"),
} - {"create.after_commit", "create.after_plan"}
"""Points at which a runtime may have been called, and the record has no outcome yet."""
UNBORN = ("adopt.before_discard", "adopt.after_discard")
"""Reached where a start finds what never ran."""


OF_NO_RUNTIME = ("start", "devices", "node", "drain", "shutdown", "plugin", "claim", "engines")
"""Steps without a runtime are tried on one of them, in a soak on both."""


def points_of(runtime: str) -> list[str]:
    points = [name for name, point in POINTS.items() if runtime in point.on]
    if runtime == "docker" and not SOAK_S:
        points = [point for point in points if point.partition(".")[0] not in OF_NO_RUNTIME]
    return points


def asked_of(runtime: str) -> list[str]:
    """Return the points that a node which is ready passes over a request or a death."""
    points = [point for point in points_of(runtime) if point not in AT_START]
    return points + [p for p in points_of(runtime) if p.startswith("plugin.") and p in AT_START]


def at_start_of(runtime: str) -> list[str]:
    return [point for point in AT_START if point in points_of(runtime)]


def lives(runtime: str, chance: random.Random) -> list[tuple[str, str]]:
    """Return what to die at, and at what in the next life, if anything.

    In a soak all pairs of points; else once in every state, at one of its points.
    """
    if SOAK_S:
        everything = list(product(asked_of(runtime), at_start_of(runtime)))
        return chance.sample(everything, len(everything))
    firsts, seconds = (
        [chance.choice(points) for points in states_of(points, runtime).values()]
        for points in (asked_of(runtime), at_start_of(runtime))
    )
    seconds = [point for point in seconds if point not in UNBORN]
    seconds += [""] * (len(firsts) - len(seconds))
    unborn = "create.after_engine_create" if runtime == "docker" else "create.after_group"
    pairs = zip(firsts, chance.sample(seconds, len(firsts)), strict=True)
    return [*pairs, *((unborn, second) for second in UNBORN)]


def lives_of(runtime: str, part: int) -> list[tuple[str, str]]:
    """Return the lives of one part; consecutive and equivalent ones stay together."""
    everything = lives(runtime, random.Random(SEED))
    return everything[len(everything) * part // PARTS : len(everything) * (part + 1) // PARTS]


@pytest.mark.parametrize("runtime", ["process", "docker"])
def test_parts_cover_a_failpoint_of_every_state(runtime: str) -> None:
    shared = [life for part in range(PARTS) for life in lives_of(runtime, part)]
    assert shared == lives(runtime, random.Random(SEED))
    asked, at_start = (
        states_of(points, runtime).keys() for points in (asked_of(runtime), at_start_of(runtime))
    )
    assert states_of((point for point, _ in shared), runtime).keys() == asked
    assert states_of((second for _, second in shared if second), runtime).keys() == at_start


class Sweep:
    def __init__(self, node: CheckedNode, registry: Registry) -> None:
        self.node = node
        self.daemon = node.daemon
        self.registry = registry
        self.reached: set[str] = set()
        self.runs = 0
        self._number = 0

    async def residents(self) -> None:
        for agent in ("agent-1", "agent-2"):
            body = {"kernel_id": f"resident-{agent}", "slots": ONE, "command": ["sleep", A_DAY_S]}
            await self.daemon.running(agent, **body)
        self.lives = self.node.live_commands()

    async def life(self, point: str, second: str) -> None:
        """One life that ends at a point, and one that ends at another, if any, while it starts."""
        node = self.node
        assert await node.start(f"{point}={action(point)}"), point
        before = await node.check()
        self._number += 1
        kernel_id = f"k{self._number}"
        touched = {*await self.provoke(point, kernel_id), kernel_id}
        self.reached.add(point)
        if not await node.start(f"{second}=kill" if second else ""):
            self.reached.add(second)
            assert await node.start()
        await node.check(before, touched)
        await self.same_again(kernel_id)
        await node.release(f"c-{kernel_id}")
        now = node.live_commands()
        assert {k: now.get(k) for k in self.lives} == self.lives, (point, second)
        await node.kill()
        self.runs += 1

    async def same_again(self, kernel_id: str) -> None:
        """The same create gives the same kernel, or another try, or word that it is not known."""
        known = {k["kernel_id"]: k for k in await self.daemon.get("/v1/kernels")}
        answer = await self.node.create(kernel_id, **self._body)
        if kernel_id not in known:
            assert answer.status in (201, 422)
        elif known[kernel_id]["state"] == "creating":
            assert answer.status == 503
        else:
            assert answer.status == 200
            assert answer.json["container_id"] == known[kernel_id]["container_id"]
            assert answer.json["pid"] == known[kernel_id]["pid"]
        await self.node.remove(kernel_id)

    async def provoke(self, point: str, kernel_id: str) -> set[str]:
        """Ask for what passes a point; return the kernels that may end over it.

        On a busy machine a record may be written again, or a kernel observed, before its create is
        answered: then the create itself passes the point, early.
        """
        self._body, is_early = self.body(point), False
        kind = "create" if point.endswith("_move") else point.partition(".")[0]
        if kind in ("create", "intent", "shim", "stop", "delete", "record", "reconcile"):
            answer = await self.node.create(kernel_id, **self._body)
            assert answer is NO_ANSWER or answer.status == 201, point
            is_early = answer is NO_ANSWER and kind not in ("create", "intent", "shim")
            if answer is not NO_ANSWER and kind in ("stop", "reconcile"):
                assert answer.json["state"] == "running"
        match kind:
            case _ if is_early:
                pass
            case "stop":
                await self.node.try_call("POST", f"/v1/kernels/{kernel_id}/stop", {"timeout": 0.2})
            case "delete" | "record":
                if point.endswith("_replace"):  # written again if it is missing
                    (self.daemon.folder / "state" / "records" / f"{kernel_id}.json").unlink()
                await self.node.remove(kernel_id)
            case "reconcile":
                os.kill(self.node.live_commands()[kernel_id][0], signal.SIGKILL)
            case "claim":
                await self.node.claim(f"c-{kernel_id}")
                await self.node.release(f"c-{kernel_id}")
            case "engines":
                await self.node.try_call("PUT", "/v1/engines/test", {"ready": True})
            case "drain":
                is_drained = (await self.daemon.device("cuda15"))["state"] == "drained"
                verb = "undrain" if is_drained else "drain"
                await self.node.try_call("POST", f"/v1/devices/cuda/cuda15/{verb}")
            case "shutdown":
                self.daemon.process.send_signal(signal.SIGTERM)
            case "plugin":
                self.node.kill_plugins()
        status = await self.node.wait_killed()
        assert status == -signal.SIGKILL, (point, status, self.daemon.log[-3000:])
        intent = self.daemon.folder / "state" / "intents" / f"{kernel_id}.json"
        is_told = is_early or point.endswith("_exit")
        assert is_told or intent.exists() == (point in INTENDED), point
        return {kernel_id}

    def body(self, point: str) -> dict:
        if point in ("create.before_undo", "create.after_undo"):
            return {"slots": ONE, "command": ["/nowhere"]}
        if point == "create.after_pull":
            image = self.registry.image("sweep", rootfs())
            return {"slots": ONE, "image": image, "pull_policy": "always"}
        if point.startswith("shim.") and point.endswith("_exit"):
            return {"slots": ONE, "command": ["true"]}
        if point.startswith("stop.after_"):
            return {"slots": ONE, "command": ["sh", "-c", "trap '' TERM; sleep 1000"]}
        return {"slots": ONE}


A_DAY_S = "86400"


def action(point: str) -> str:
    """Return what the point does; a shim's kill the daemon, which waits for its answer.

    A start passes each of a plugin's points once before readiness, but for the end of its process.
    """
    what, _, when = point.partition(".")
    if what == "plugin":
        return "kill" if when.endswith("_kill") else "1*off->kill"
    return "kill(parent)" if what == "shim" else "kill"


def other_process(request: pytest.FixtureRequest) -> Callable[[], object]:
    """A process of another node's kernel, and what can be seen of it."""
    marks = {"AGENTD_NODE": "another", "AGENTD_KERNEL": "k1"}
    process = subprocess.Popen(["sleep", A_DAY_S], env=marks, start_new_session=True)
    request.addfinalizer(process.kill)
    return lambda: (process.poll(), start_time(process.pid))


def other_container(request: pytest.FixtureRequest, engine: Engine) -> Callable[[], object]:
    """A container of another node that never ran, and what can be seen of it."""
    labels = {"io.agentd.node": "another", "io.agentd.kernel": "k1", "io.agentd.record": "{"}
    config = {"Image": "agentd-test:1", "Cmd": ["true"], "Labels": labels}
    name = kernel_name("another", "k1")
    made = engine.call("POST", f"/containers/create?name={name}", config)
    request.addfinalizer(lambda: engine.call("DELETE", f"/containers/{made['Id']}?force=1"))
    return lambda: engine.call("GET", f"/containers/{made['Id']}/json")


@pytest.mark.long
@pytest.mark.needs("cgroups")
@pytest.mark.timeout(200 + 2 * SOAK_S)
@pytest.mark.parametrize("part", range(PARTS))
async def test_death_at_every_failpoint_loses_nothing(
    part: int, node: CheckedNode, registry: Registry, request: pytest.FixtureRequest
) -> None:
    runtime, engine = node.daemon.runtime, node.engine
    sweep = Sweep(node, registry)
    assert await node.start(text=NODE)
    await sweep.residents()
    await node.kill()
    others = [other_process(request), *([other_container(request, engine)] if engine else [])]
    seen = [other() for other in others]
    pairs = lives_of(runtime, part)
    for point, second in until_soak_ends(pairs, SOAK_S / PARTS):
        await sweep.life(point, second)
        if SOAK_S and sweep.runs % 10 == 0:
            # unresolved creates are held again at each start
            await node.start()
            await node.remove_kernels_except(*sweep.lives)
            await node.kill()
    assert SOAK_S or {point for pair in pairs for point in pair if point} == sweep.reached
    await node.start()
    await node.remove_kernels_except(*sweep.lives)
    await node.check()
    assert node.live_commands() == sweep.lives
    await node.remove_kernels_except()
    await node.check()
    assert [other() for other in others] == seen
    print(f"\n{runtime}, part {part}, seed {SEED}: {len(sweep.reached)} points,"
          f" {sweep.runs} runs, {node.deaths} deaths, no violation")  # fmt: skip


def shared_states(runtime: str) -> list[list[str]]:
    """Return the points of each state that has several; or two points of one, by chance."""
    found = [
        points
        for is_at_start in (False, True)
        for points in states_of(
            [point for point in points_of(runtime) if (point in AT_START) is is_at_start], runtime
        ).values()
        if len(points) > 1
    ]
    chance = random.Random(SEED)
    return found if SOAK_S else [chance.sample(chance.choice(found), 2)]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runtime", ["process", pytest.param("docker", marks=pytest.mark.docker)])
async def test_deaths_at_failpoints_of_one_state_leave_the_same(
    runtime: str, folder: Path, registry: Registry, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue("engine") if runtime == "docker" else None
    for points in shared_states(runtime):
        dead = {}
        for point in points:
            own = folder / point
            own.mkdir(mode=0o755)
            dead[point] = node = CheckedNode(Daemon(own, runtime, engine))
            node.daemon.node = f"{folder.name}-{point}"
            await die(Sweep(node, registry), point)
        await until_same(dead)
        for node in dead.values():
            await node.daemon.close()


async def die(sweep: Sweep, point: str) -> None:
    """Kill a daemon at a point, during a request or at the start of a node with a kernel."""
    node = sweep.node
    if point in AT_START:
        assert await node.start(text=NODE)
        await sweep.daemon.running(kernel_id="k1", slots=ONE)
        await node.kill()
        assert not await node.start(f"{point}=kill")
    else:
        assert await node.start(f"{point}={action(point)}", NODE)
        await sweep.provoke(point, "k1")


async def until_same(dead: dict[str, CheckedNode]) -> None:
    """Wait until the nodes look the same: plugins and shims end after the daemon does."""

    def differences() -> str:
        (first, looks), *others = [(p, left_behind(n).split("\n")) for p, n in dead.items()]
        return "\n".join(
            line for p, lines in others for line in unified_diff(looks, lines, first, p, n=0)
        )

    await until(differences, "", text="nodes that look the same", within_s=SETTLE_TIMEOUT_S)
