"""What many kernels cost, and whether anything grows that should not.

    python benchmarks/scale.py [--kernels 1000] [--cycles 2000] [--json]

Runs the daemon against an engine stand-in that answers at once. Prints the time of
`GET /v1/kernels` with many kernels, half of them ended; the memory (PSS) that each
adds; and memory, file descriptors and the engine's list before and after many cycles of
create and delete, measured after a first tenth of them has warmed everything up.
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

from create import AGENTS, BODY, ROOT, Caller, pss_mib, spread

sys.path.insert(0, str(ROOT / "tests"))
from support.daemon import Daemon, gpus

AT_ONCE = 8


async def create(agentd: Caller, name: str) -> None:
    body = {**BODY, "kernel_id": name, "slots": {"cpu": 0, "mem": "6m"}}
    await agentd.call("POST", "/v1/agents/agent-1/kernels", body)


async def many(agentd: Caller, pid: int, count: int) -> dict[str, Any]:
    await create(agentd, "first")
    before = pss_mib(pid)
    for first in range(0, count, AT_ONCE):
        names = [f"k{n}" for n in range(first, min(first + AT_ONCE, count))]
        await asyncio.gather(*(create(agentd, name) for name in names))
    for n in range(0, count, 2):
        await agentd.call("POST", f"/v1/kernels/k{n}/stop")
    after = pss_mib(pid)
    durations = []
    for _ in range(30):
        start = time.perf_counter()
        kernels = await agentd.call("GET", "/v1/kernels")
        durations.append(time.perf_counter() - start)
    assert len(kernels) == count + 1
    for kernel in kernels:
        await agentd.call("DELETE", f"/v1/kernels/{kernel['kernel_id']}?timeout=0")
    return {
        "kernels": count,
        "list": spread(durations),
        "kib_per_kernel": round((after - before) * 1024 / count, 1),
    }


def footprint(pid: int) -> dict[str, float]:
    return {
        "pss_mib": pss_mib(pid),
        "descriptors": len([*Path(f"/proc/{pid}/fd").iterdir()]),
        "threads": len([*Path(f"/proc/{pid}/task").iterdir()]),
    }


async def cycles(agentd: Caller, raw: Caller, pid: int, count: int) -> dict[str, Any]:
    before = None
    for first in range(0, count, AT_ONCE):
        if before is None and first >= count // 10:
            before = footprint(pid)
        names = [f"c{n}" for n in range(first, min(first + AT_ONCE, count))]
        await asyncio.gather(*(create(agentd, name) for name in names))
        await asyncio.gather(
            *(agentd.call("DELETE", f"/v1/kernels/{name}?timeout=0") for name in names)
        )
    remaining = await raw.call("GET", "/v1.41/containers/json?all=1")
    return {"cycles": count, "before": before, "after": footprint(pid), "left": len(remaining)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=1000)
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="agentd-bench-", dir="/tmp"))
    path = folder / "stand-in.sock"
    stand_in = subprocess.Popen([sys.executable, ROOT / "benchmarks" / "stand_in.py", path])
    daemon = Daemon(folder, "docker")
    daemon.engine = path
    try:
        while not path.exists():
            await asyncio.sleep(0.01)
        await daemon.start(AGENTS + gpus())
        agentd, raw = Caller(folder / "agentd.sock"), Caller(path)
        pid = daemon.process.pid
        results = {
            "many": await many(agentd, pid, options.kernels),
            "cycles": await cycles(agentd, raw, pid, options.cycles),
        }
        for caller in (agentd, raw):
            await caller.session.close()
    finally:
        await daemon.stop()
        daemon.notes.close()
        stand_in.terminate()
        stand_in.wait()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(results, indent=None if options.json else 1))


if __name__ == "__main__":
    asyncio.run(main())
