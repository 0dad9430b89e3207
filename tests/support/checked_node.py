"""A node looked at from outside: what agentd says, beside what is really there.

The snapshot that the rules of `agentd.core.invariants` judge is made here from the RPC, from the
engine or /proc, and from the state folder, without a line of the daemon's own adapters.
"""

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Collection, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from agentd.core.invariants import (
    NodeSnapshot,
    PresentKernel,
    RecordedClaim,
    RecordedKernel,
    Violation,
    find_violations,
)
from agentd.core.kernel.plan import kernel_name, name_prefix
from agentd.core.kernel.states import ENDED, LIVE, STARTING, KernelState
from support.daemon import AGENTS, Answer, Daemon, gpus
from support.fork_server import PLUGIN

SEED = int(os.environ["AGENTD_SEED"])
"""The seed of tests that choose at random; the run prints it."""
SOAK_S = float(os.environ.get("AGENTD_SOAK", "0"))
"""For how long each test tries everything (seconds, `make soak`); 0: a sample, once."""
NODE = '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(32)
"""Two agents that share 32 GPUs."""
ONE = {"cuda.device": 1, "cpu": 0, "mem": "16m"}
"""The slots of one kernel among many."""
_T = TypeVar("_T")
Environment = tuple[int, dict[str, str]]
"""A process, and its environment."""


def until_soak_ends(items: Iterable[_T], soak_s: float = SOAK_S) -> Iterator[_T]:
    """Yield what is to be tried, for as long as a soak lasts."""
    end = time.monotonic() + (soak_s or math.inf)
    for item in items:
        if time.monotonic() > end:
            return
        yield item


SETTLE_TIMEOUT_S = 20.0
IMMEDIATE_RULES = {"capacity", "owner", "survival"}
"""Rules that must hold at every moment; the others follow events, which take their time."""
KERNEL_CGROUPS = [
    Path("/sys/fs/cgroup") / hierarchy / "agentd-kernels" for hierarchy in ("memory", "pids", ".")
]
SIGKILLED = -9
NO_ANSWER = Answer(0, {}, b"no answer, as the daemon died")


class CheckedNode:
    """A daemon, its kernels, and everything that it has left behind so far."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.engine = daemon.test_engine
        self.dead: set[int] = set()
        self.deaths = 0

    @property
    def node_id(self) -> str:
        return self.daemon.node

    async def start(self, points: str = "", text: str | None = None) -> bool:
        """Start with failpoints set; False if it died at one before it was ready."""
        try:
            await self.daemon.start(text, **({"AGENTD_FAILPOINTS": points} if points else {}))
        except AssertionError:
            process = self.daemon.process
            if process is None or process.poll() != SIGKILLED:
                raise
            await self.wait_killed()
            return False
        return True

    async def wait_killed(self) -> int:
        """Wait for the daemon's death, and take note of it."""
        process, self.daemon.process = self.daemon.process, None
        assert process is not None
        try:
            status = await asyncio.to_thread(process.wait, 20)
        except subprocess.TimeoutExpired:
            self.daemon.process = process
            raise AssertionError(f"it lives:\n{self.daemon.log[-6000:]}") from None
        self.dead.add(process.pid)
        self.deaths += 1
        return status

    async def kill(self, number: int = 9) -> int:
        assert self.daemon.process is not None
        self.daemon.process.send_signal(number)
        return await self.wait_killed()

    def kill_plugins(self) -> None:
        """Kill every process of the daemon's plugins."""
        assert self.daemon.process is not None
        mark = f"{self.daemon.process.pid}."
        plugins = [
            p for p, env in agentd_processes() if env.get("AGENTD_PLUGIN", "").startswith(mark)
        ]
        assert plugins
        for pid in plugins:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def try_call(
        self, method: str, path: str, body: Any = None, *, socket: str = "agentd"
    ) -> Answer:
        """Call; `NO_ANSWER` where the daemon dies over it."""
        return await _try(self.daemon.call(method, path, body, socket=socket))

    async def create(self, kernel_id: str, agent: str = "agent-1", **body: Any) -> Answer:
        body.setdefault("slots", {"cuda.device": 1})
        return await _try(self.daemon.create(agent, kernel_id=kernel_id, **body))

    async def claim(self, claim_id: str, **body: Any) -> Answer:
        """Claim a device by name."""
        content = {"claim_id": claim_id, "holder": {"name": claim_id}, "slots": ONE, **body}
        return await self.try_call("POST", "/v1/agents/agent-1/claims", content)

    async def claim_ids(self) -> set[str]:
        return {claim["claim_id"] for claim in await self.daemon.get("/v1/claims")}

    async def release(self, claim_id: str) -> Answer:
        return await self.try_call("DELETE", f"/v1/claims/{claim_id}")

    async def remove(self, kernel_id: str) -> Answer:
        return await self.try_call("DELETE", f"/v1/kernels/{kernel_id}?timeout=0")

    async def snapshot(self) -> NodeSnapshot:
        """Make a snapshot of the node, from outside."""
        devices = await self.daemon.get("/v1/devices")
        kernels = await self.daemon.get("/v1/kernels")
        agents = await self.daemon.get("/v1/agents")
        by_stable_id = {d["stable_id"]: f"{d['device_name']}/{d['id']}" for d in devices}
        accounted = {k["kernel_id"]: _booked(k) for k in kernels}
        processes = list(agentd_processes())
        found = list(self._present(by_stable_id, processes))
        present = dict(found)
        assert len(present) == len(found), "two kernels of one name"
        owners = [set(d["agents"]) for d in devices if d["device_name"] != "mem"]
        return NodeSnapshot(
            is_shared=len(agents) > 1 and any(len(owner) > 1 for owner in owners),
            capacities={
                f"{d['device_name']}/{d['id']}/{slot}": units(slot, use["capacity"])
                for d in devices
                for slot, use in d["slots"].items()
            },
            holdings=_holdings(devices),
            recorded=accounted,
            present=present,
            strays=tuple(self._strays(accounted, processes)),
            divisible=frozenset({"mem/root"}),
            claims={
                f"claim {claim['claim_id']}": RecordedClaim(
                    claim["agent_id"], self._is_observed(claim["claim_id"])
                )
                for claim in await self.daemon.get("/v1/claims")
            },
        )

    def _is_observed(self, claim_id: str) -> bool:
        """Return whether a claim's record says so; one that cannot be read does not."""
        with contextlib.suppress(OSError, ValueError):
            record = self.daemon.folder / "state" / "claims" / f"{claim_id}.json"
            return bool(json.loads(record.read_text())["observed"])
        return False

    async def check(
        self,
        before: NodeSnapshot | None = None,
        touched: Collection[str] = (),
        *,
        allowed: Collection[str] = (),
    ) -> NodeSnapshot:
        """Fail unless every rule holds; what only takes a moment is given one."""
        end = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            snapshot = await self.snapshot()
            found = self._violations(snapshot, before, touched, allowed)
            if not found:
                return snapshot
            if any(v.rule in IMMEDIATE_RULES for v in found) or time.monotonic() > end:
                raise AssertionError("\n".join(map(str, [*found, self.daemon.log[-6000:]])))
            await asyncio.sleep(0.05)

    @staticmethod
    def _violations(
        snapshot: NodeSnapshot,
        before: NodeSnapshot | None,
        touched: Collection[str],
        allowed: Collection[str],
    ) -> list[Violation]:
        found = find_violations(snapshot)
        if before is not None:
            found += lost_kernels(before, snapshot, touched)
        return [v for v in found if v.rule not in allowed]

    async def remove_kernels_except(self, *keep: str) -> None:
        """Remove every kernel except some, and wait for unresolved ones."""
        end = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < end:
            left = [k for k in await self.daemon.get("/v1/kernels") if k["kernel_id"] not in keep]
            if not left:
                return
            for kernel in left:
                await self.remove(kernel["kernel_id"])
            await asyncio.sleep(0.1)
        raise AssertionError(f"not removed: {left}")

    def live_commands(self) -> dict[str, tuple[int, int]]:
        """Return the pid and start time of every kernel's command, as the machine has them."""
        pids = {}
        if self.engine is not None:
            for container in self._containers():
                kernel_id = container["Labels"]["io.agentd.kernel"]
                shown = self.engine.call("GET", f"/containers/{container['Id']}/json")
                pids[kernel_id] = shown.get("State", {}).get("Pid", 0)
        pids |= self._leaders(agentd_processes())
        return {k: (pid, start_time(pid)) for k, pid in pids.items() if start_time(pid)}

    def session_members(self, pid: int) -> list[int]:
        """Return the processes of a kernel, without its shim."""
        members = [path.name for path in Path("/proc").glob("[0-9]*")]
        return [int(name) for name in members if session_id(int(name)) == pid] or [pid]

    def _containers(self) -> list[dict[str, Any]]:
        assert self.engine is not None
        return [
            container
            for container in self.engine.containers()
            if container["Labels"].get("io.agentd.node") == self.node_id
            and container["Names"] == [f"/{self._name(container['Labels'])}"]
        ]

    def _name(self, labels: dict[str, str]) -> str:
        return f"{name_prefix(self.node_id)}{labels.get('io.agentd.kernel', '')}"

    def _present(
        self, by_stable_id: dict[str, str], processes: Iterable[Environment]
    ) -> Iterator[tuple[str, PresentKernel]]:
        if self.engine is not None:
            for container in self._containers():
                labels = container["Labels"]
                given = _given(labels.get("io.agentd.record", ""), by_stable_id)
                is_alive = container["State"] in ("running", "paused")
                yield labels["io.agentd.kernel"], PresentKernel(container["Id"], is_alive, given)
        alive = {kernel_id: str(pid) for kernel_id, pid in self._leaders(processes).items()}
        folders = self.daemon.folder / "state" / "kernels"
        named = {path.name for path in folders.glob("[!.]*")} if folders.exists() else set()
        for kernel_id in named | alive.keys():
            record = folders / kernel_id / "record.json"
            text = record.read_text(errors="replace") if record.exists() else ""
            given = _given(text, by_stable_id)
            yield kernel_id, PresentKernel(alive.get(kernel_id, ""), kernel_id in alive, given)

    def _leaders(self, processes: Iterable[Environment]) -> dict[str, int]:
        """Return the process of each kernel's command: it leads its session."""
        return {
            env["AGENTD_KERNEL"]: pid
            for pid, env in processes
            if env.get("AGENTD_NODE") == self.node_id and session_id(pid) == pid
        }

    def _strays(
        self, accounted: dict[str, RecordedKernel], processes: Iterable[Environment]
    ) -> Iterator[str]:
        state = self.daemon.folder / "state"
        phases = {"intents": STARTING, "records": LIVE, "ended": ENDED}
        saved = {(p.parent.name, p.stem) for name in phases for p in state.glob(f"{name}/*.json")}
        for folder, kernel_id in saved:
            if kernel_id not in accounted or accounted[kernel_id].state not in phases[folder]:
                yield f"record {folder}/{kernel_id}"
        for kernel_id in accounted.keys() - {kernel_id for _, kernel_id in saved}:
            if accounted[kernel_id].state in LIVE:
                yield f"kernel {kernel_id} without a record"
        for path in [*state.glob(".*.new"), *state.glob("*/.*")]:
            is_prepared = path == state / "intents/.next.new" and not path.stat().st_size
            if path.name.removeprefix(".removed-") not in accounted and not is_prepared:
                yield f"left over {path.relative_to(state)}"
        for pid, env in processes:
            if env.get("AGENTD_NODE") == self.node_id and env["AGENTD_KERNEL"] not in accounted:
                yield f"process {pid} of {env['AGENTD_KERNEL']}"
            daemon = int(env.get("AGENTD_PLUGIN", "0").partition(".")[0])
            is_now = self.daemon.process is not None and daemon == self.daemon.process.pid
            if daemon in self.dead and not is_now:  # a pid comes again, in a long soak
                yield f"process {pid} of a dead daemon's plugin"
        kept = {kernel_name(self.node_id, kernel_id) for kernel_id in accounted}
        for parent in KERNEL_CGROUPS:
            for group in parent.glob(f"{name_prefix(self.node_id)}*"):
                if group.name not in kept:
                    yield f"cgroup {group.name}"


def lost_kernels(
    before: NodeSnapshot, after: NodeSnapshot, touched: Collection[str] = ()
) -> list[Violation]:
    """Return the kernels that changed or vanished between two snapshots, except touched ones."""
    lost = []
    for kernel_id, lived in before.present.items():
        if kernel_id in touched or not lived.is_alive:
            continue
        now, accounted = after.present.get(kernel_id), after.recorded.get(kernel_id)
        if now is None or not now.is_alive or now.handle != lived.handle:
            what = f"is {now.handle if now and now.is_alive else 'gone'}"
            lost.append(Violation("survival", f"kernel {kernel_id} was {lived.handle}, {what}"))
        elif accounted is None or accounted.state not in LIVE | STARTING:
            lost.append(Violation("survival", f"kernel {kernel_id} is alive but not recorded"))
        elif now.allocation != lived.allocation:
            lost.append(Violation("survival", f"kernel {kernel_id} holds {now.allocation}"))
    return lost


async def _try(call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except (aiohttp.ClientError, OSError):
        return NO_ANSWER


def _booked(kernel: dict[str, Any]) -> RecordedKernel:
    pid = str(kernel["pid"]) if kernel["pid"] and not kernel["unit"] else None
    handle = kernel["container_id"] or pid
    return RecordedKernel(kernel["agent_id"], KernelState(kernel["state"]), handle)


def _given(record: str, by_stable_id: dict[str, str]) -> dict[str, int] | None:
    try:
        shares = json.loads(record)["allocation"]
    except (ValueError, KeyError, RecursionError):
        return None
    return {
        f"{by_stable_id.get(share['stable_id'], share['stable_id'])}/{share['slot']}": units(
            share["slot"], share["amount"]
        )
        for share in shares
    }


def _holdings(devices: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the holders with their amounts, by device and slot; a whole device has the slot ""."""
    holdings: dict[str, dict[str, int]] = {}
    for device in devices:
        for holder in device["holders"]:
            for slot, amount in (holder["amounts"] or {"": "0"}).items():
                place = f"{device['device_name']}/{device['id']}/{slot}"
                name = (
                    f"claim {holder['claim_id']}" if "claim_id" in holder else holder["kernel_id"]
                )
                holdings.setdefault(place, {})[name] = units(slot, amount)
    return holdings


def units(slot: str, amount: str) -> int:
    return int(amount) if slot.rpartition(".")[2] == "mem" else int(Decimal(amount) * 10**6)


def agentd_processes() -> Iterator[Environment]:
    """Yield the processes that agentd started, wherever their environment may be read.

    A forked plugin has the pid of its daemon in its name instead.
    """
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone, of all processes
        if not name.isdecimal():
            continue
        try:
            text = Path(f"/proc/{name}/environ").read_bytes()
            if b"AGENTD_" not in text:  # that of a fork has the $AGENTD_SEED of its server
                continue
            program, *words = Path(f"/proc/{name}/comm").read_text(errors="replace").split()
        except OSError:
            continue
        if program == PLUGIN:
            yield int(name), {"AGENTD_PLUGIN": f"{words[0]}."}
            continue
        items = (i.partition("=") for i in text.decode(errors="replace").split("\0") if i)
        yield int(name), {key: value for key, _, value in items}


def _stat(pid: int) -> list[str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def session_id(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[3]) if fields else 0


def start_time(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it does not live."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0
