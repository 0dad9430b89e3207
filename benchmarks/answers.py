"""What a request costs, and what access control adds to it.

    python benchmarks/answers.py [--kernels 1000] [--rounds 400] [--json]

Runs the daemon against an engine stand-in, and asks in turn, on one connection: `/readyz`, which
needs no caller; `/v1/whoami`, which needs one; the slot types as an admin and as an agent's
caller; and the list of all kernels as both, then with eight callers at once.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from create import AGENTS, ROOT, Caller, spread
from scale import create

sys.path.insert(0, str(ROOT / "tests"))
from support.daemon import Daemon, gpus

AT_ONCE = 8
SOCKET = '[[rpc.sockets]]\npath = "{folder}/team.sock"\nrole = "agent"\nagents = ["agent-1"]\n'


async def time_call(caller: Caller, path: str) -> float:
    before = time.perf_counter()
    await caller.call("GET", path)
    return time.perf_counter() - before


async def measure_in_turn(pairs: dict[str, tuple[Caller, str]], rounds: int) -> dict[str, Any]:
    """Ask each once in every round, so that a busy moment hits all of them."""
    durations: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(rounds):
        for name, (caller, path) in pairs.items():
            durations[name].append(await time_call(caller, path))
    return {name: spread(times) for name, times in durations.items()}


async def measure_at_once(callers: list[Caller], path: str, rounds: int) -> dict[str, Any]:
    async def one(caller: Caller) -> list[float]:
        return [await time_call(caller, path) for _ in range(rounds)]

    start = time.perf_counter()
    durations = [
        duration for series in await asyncio.gather(*map(one, callers)) for duration in series
    ]
    total_s = time.perf_counter() - start
    return {**spread(durations), "requests_per_s": round(len(durations) / total_s, 1)}


async def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="agentd-bench-", dir="/tmp"))
    stand_in = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "stand_in.py", folder / "docker.sock"]
    )
    daemon = Daemon(folder, "docker")
    daemon.engine = folder / "docker.sock"
    try:
        while not daemon.engine.exists():
            await asyncio.sleep(0.05)
        await daemon.start(AGENTS + gpus(8) + SOCKET.format(folder=folder))
        admin, team = Caller(folder / "agentd.sock"), Caller(folder / "team.sock")
        callers = [Caller(folder / "agentd.sock") for _ in range(AT_ONCE)]
        for first in range(0, options.kernels, AT_ONCE):
            names = [f"k{n}" for n in range(first, min(first + AT_ONCE, options.kernels))]
            await asyncio.gather(*(create(admin, name) for name in names))
        result = {
            "one": await measure_in_turn(
                {
                    "readyz": (admin, "/readyz"),
                    "whoami": (admin, "/v1/whoami"),
                    "slot types, admin": (admin, "/v1/slot-types"),
                    "slot types, agent": (team, "/v1/slot-types"),
                },
                options.rounds,
            ),
            "list": await measure_in_turn(
                {
                    "admin": (admin, "/v1/kernels"),
                    "agent": (team, "/v1/kernels"),
                    "page of 100": (admin, "/v1/kernels?limit=100"),
                },
                max(20, options.rounds // 8),
            ),
            "list, eight at once": await measure_at_once(
                callers, "/v1/kernels", max(10, options.rounds // 20)
            ),
        }
        for caller in (admin, team, *callers):
            await caller.session.close()
    finally:
        await daemon.stop()
        stand_in.terminate()
        stand_in.wait()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=None if options.json else 1))


if __name__ == "__main__":
    asyncio.run(main())
