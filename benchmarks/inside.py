"""What a command inside a kernel costs over the engine's own exec, side by side in one run.

    python benchmarks/inside.py [--pairs 30] [--json]

Starts an engine of its own (needs root, dockerd, containerd, runc and busybox). In pairs: `true`
inside a container through agentd, from the first byte to the exit code, and by the engine's API
(create, start, inspect until it has ended); `true` inside a process kernel through agentd; and 256
MiB through `cat`, in MiB per second both ways together.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from create import AGENTS, BODY, ROOT, Caller, spread

sys.path.insert(0, str(ROOT / "tests"))
from agentd.client import AsyncClient
from support.daemon import Daemon
from support.engine import Engine

MIB = 256


async def through_agentd(client: AsyncClient) -> float:
    before = time.perf_counter()
    async with client.exec("k", ["true"]) as running:
        async for _ in running:
            pass
    assert running.exit_code == 0
    return time.perf_counter() - before


async def through_engine(engine: Caller, container: str) -> float:
    before = time.perf_counter()
    config = {"Cmd": ["true"], "AttachStdout": True, "AttachStderr": True}
    created = await engine.call("POST", f"/containers/{container}/exec", config)
    url = f"http://x/exec/{created['Id']}/start"
    async with engine.session.post(url, json={"Detach": False, "Tty": False}) as response:
        await response.read()
    while (await engine.call("GET", f"/exec/{created['Id']}/json"))["Running"]:
        pass
    return time.perf_counter() - before


async def throughput(client: AsyncClient) -> float:
    """Return MiB per second through `cat`."""
    block, received = bytes(1 << 20), 0
    before = time.perf_counter()
    async with client.exec("k", ["cat"]) as running:

        async def feed() -> None:
            for _ in range(MIB):
                await running.write(block)
            await running.close_input()

        feeding = asyncio.create_task(feed())
        async for _, data in running:
            received += len(data)
        await feeding
    assert received == MIB << 20
    return MIB / (time.perf_counter() - before)


async def measure(pairs: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
    folder.chmod(0o755)
    engine = Engine(folder / "engine")
    (folder / "engine").mkdir()
    engine.start()
    engine.import_image()
    results: dict[str, Any] = {}
    try:
        for runtime in ("docker", "process"):
            (folder / runtime).mkdir(mode=0o755)
            daemon = Daemon(folder / runtime, runtime, engine)
            await daemon.start(AGENTS)
            body = BODY if runtime == "docker" else {**BODY, "image": None}
            kernel = await daemon.running(kernel_id="k", **{k: v for k, v in body.items() if v})
            raw = Caller(engine.socket)
            async with AsyncClient(daemon.folder / "agentd.sock") as client:
                await through_agentd(client)
                agentd_times, engine_times = [], []
                for _ in range(pairs):
                    agentd_times.append(await through_agentd(client))
                    if runtime == "docker":
                        engine_times.append(await through_engine(raw, kernel["container_id"]))
                results[runtime] = spread(agentd_times)
                if engine_times:
                    results["engine"] = spread(engine_times)
                    ratio = results["docker"]["median_ms"] / results["engine"]["median_ms"]
                    results["ratio"] = round(ratio, 2)
                results[f"{runtime}_mib_per_s"] = round(await throughput(client), 1)
            await raw.session.close()
            await daemon.close()
    finally:
        engine.clean()
        engine.end()
        shutil.rmtree(folder, ignore_errors=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.pairs)), indent=None if options.json else 2))
