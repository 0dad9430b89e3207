"""What agentd costs over the raw engine, side by side in one run.

    python benchmarks/create.py [--pairs 50] [--json]

Starts an engine of its own (needs root, dockerd, containerd, runc and busybox) and prints:

- a create through agentd against the engine's own create, start and inspect of the same container,
  in pairs, one at a time and eight at once;
- agentd's own share of a create, against a stand-in that answers at once, and the engine calls of
  one create, with the daemon on one core, caller and stand-in on another; and the processor time of
  the daemon for a create with its delete;
- the memory (PSS) of the idle daemon;
- the time from start to ready without kernels and with 100 containers to adopt, beside the import
  of agentd's libraries.

`goals.py` has the goals and checks them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.daemon import Daemon, gpus  # noqa: E402 - the tests' harness is the benchmarks' too
from support.engine import IMAGE, Engine  # noqa: E402

AGENTS = '[[agents]]\nid = "agent-1"\n'
BODY = {"image": IMAGE, "command": ["sleep", "1000"], "slots": {"cpu": 0, "mem": "16m"}}


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: the median, the 99th percentile, and the extremes."""
    ordered = sorted(second * 1000 for second in seconds)
    return {
        "median_ms": round(statistics.median(ordered), 2),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
        "min_ms": round(ordered[0], 2),
        "max_ms": round(ordered[-1], 2),
    }


class Caller:
    """One keep-alive connection to a unix socket."""

    def __init__(self, path: Path) -> None:
        self.session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)))

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with self.session.request(method, f"http://x{path}", json=body) as response:
            content = await response.read()
            assert response.status < 300, content
            return json.loads(content) if content else None


async def through_agentd(agentd: Caller, name: str) -> float:
    before = time.perf_counter()
    await agentd.call("POST", "/v1/agents/agent-1/kernels", {**BODY, "kernel_id": name})
    return time.perf_counter() - before


async def delete(agentd: Caller, name: str) -> None:
    await agentd.call("DELETE", f"/v1/kernels/{name}?timeout=0")


async def through_engine(engine: Caller, name: str, config: dict[str, Any]) -> float:
    """Make the three calls of a create; `config` is the request that agentd sends."""
    before = time.perf_counter()
    container = await engine.call("POST", f"/v1.41/containers/create?name={name}", config)
    await engine.call("POST", f"/v1.41/containers/{container['Id']}/start")
    await engine.call("GET", f"/v1.41/containers/{container['Id']}/json")
    return time.perf_counter() - before


async def pairs(
    daemon: Daemon, engine: Engine, config: dict[str, Any], count: int
) -> dict[str, Any]:
    agentd, raw = Caller(daemon.folder / "agentd.sock"), Caller(engine.socket)
    agentd_times, engine_times = [], []
    for n in range(count + 3):
        agentd_times.append(await through_agentd(agentd, f"a{n}"))
        await delete(agentd, f"a{n}")
        engine_times.append(await through_engine(raw, f"r{n}", config))
        await raw.call("DELETE", f"/v1.41/containers/r{n}?force=1")
    agentd_times, engine_times = agentd_times[3:], engine_times[3:]
    for caller in (agentd, raw):
        await caller.session.close()
    ratios = sorted(a / b for a, b in zip(agentd_times, engine_times, strict=True))
    return {
        "agentd": spread(agentd_times),
        "engine": spread(engine_times),
        "ratio": {
            "median": round(statistics.median(ratios), 3),
            "p10": round(ratios[len(ratios) // 10], 3),
            "p90": round(ratios[len(ratios) * 9 // 10], 3),
        },
    }


async def at_once(
    daemon: Daemon, engine: Engine, config: dict[str, Any], count: int, width: int = 8
) -> dict[str, Any]:
    """The time of `width` creates together, through agentd and through the engine, in pairs."""
    agentd, raw = Caller(daemon.folder / "agentd.sock"), Caller(engine.socket)
    agentd_times, engine_times = [], []
    for n in range(count + 1):
        names = [f"b{n}-{w}" for w in range(width)]
        before = time.perf_counter()
        await asyncio.gather(*(through_agentd(agentd, name) for name in names))
        agentd_times.append(time.perf_counter() - before)
        for name in names:
            await delete(agentd, name)
        before = time.perf_counter()
        await asyncio.gather(*(through_engine(raw, f"r{name}", config) for name in names))
        engine_times.append(time.perf_counter() - before)
        for name in names:
            await raw.call("DELETE", f"/v1.41/containers/r{name}?force=1")
    for caller in (agentd, raw):
        await caller.session.close()
    ratios = sorted(a / b for a, b in zip(agentd_times[1:], engine_times[1:], strict=True))
    return {
        "agentd": spread(agentd_times[1:]),
        "engine": spread(engine_times[1:]),
        "ratio": {"median": round(statistics.median(ratios), 3), "max": round(ratios[-1], 3)},
    }


@contextlib.contextmanager
def on_two_cores(daemon: int, engine: int) -> Iterator[None]:
    """Keep the daemon on one core, and the engine and this process on another.

    Where the scheduler puts them changes from run to run, and a create's time by a tenth with it.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        for thread in Path(f"/proc/{daemon}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores[:1])
        for pid in (engine, 0):
            os.sched_setaffinity(pid, cores[1:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


async def own_share(folder: Path, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Create against a stand-in, less what the stand-in alone takes for the same calls.

    Also return the request that agentd sends to an engine, without its labels.
    """
    path = folder / "stand-in.sock"
    stand_in = subprocess.Popen([sys.executable, ROOT / "benchmarks" / "stand_in.py", path])
    daemon = cold(Daemon(folder, "docker"))
    daemon.engine = path
    try:
        while not path.exists():
            await asyncio.sleep(0.01)
        await daemon.start(AGENTS + gpus())
        agentd, raw = Caller(folder / "agentd.sock"), Caller(path)
        await through_agentd(agentd, "warm")
        config = {**await raw.call("GET", "/last_create"), "Labels": {}}
        await delete(agentd, "warm")
        agentd_times, engine_times, processor_times = [], [], []
        calls: Any = {}

        async def through_daemon(n: int) -> None:
            nonlocal calls
            before = processor_s(daemon.process.pid)
            await raw.call("GET", "/counted")
            agentd_times.append(await through_agentd(agentd, f"a{n}"))
            calls = await raw.call("GET", "/counted")
            await delete(agentd, f"a{n}")
            processor_times.append(processor_s(daemon.process.pid) - before)

        async def directly(n: int) -> None:
            engine_times.append(await through_engine(raw, f"r{n}", config))
            await raw.call("DELETE", f"/v1.41/containers/r{n}")

        with on_two_cores(daemon.process.pid, stand_in.pid):
            for n in range(count + 20):
                # What a way finds in the processor's caches depends on the one before it.
                for run in (through_daemon, directly) if n % 2 else (directly, through_daemon):
                    await run(n)
        for caller in (agentd, raw):
            await caller.session.close()
        share = [a - b for a, b in zip(agentd_times[20:], engine_times[20:], strict=True)]
        return {
            "whole": spread(agentd_times[20:]),
            "own_share": spread(share),
            "engine_calls": calls,
            "cpu_ms": round(statistics.mean(processor_times[20:]) * 1000, 2),
        }, config
    finally:
        await daemon.stop()
        daemon.notes.close()
        stand_in.terminate()
        stand_in.wait()


def processor_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def cold(daemon: Daemon) -> Daemon:
    """Return a daemon that starts as it does in earnest: those of tests are forked."""
    daemon.program = ("-m", "agentd")
    return daemon


def pss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise OSError("no Pss")


LIBRARIES = "aiohttp.web, click, importlib_metadata, msgspec, pydantic_settings, structlog, tomlkit"
"""The yardstick of a start, as it was when its goal was set: tomlkit, and rich, which structlog
imports, are loaded by no start any more."""


def imported() -> float:
    """How long a fresh interpreter takes to import the libraries."""
    before = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {LIBRARIES}"], check=True)
    return time.perf_counter() - before


async def started(daemon: Daemon) -> float:
    await daemon.stop()
    before = time.perf_counter()
    await daemon.start()
    return time.perf_counter() - before


async def start_to_ready(daemon: Daemon, count: int) -> dict[str, Any]:
    """Start to ready without kernels beside the import, in pairs; then with `count` kernels."""
    daemon.configure('[plugins]\nallow = ["sim"]\n' + AGENTS + gpus())
    pairs = [(await started(daemon), imported()) for _ in range(7)]
    empty = statistics.median(duration for duration, _ in pairs)
    agentd = Caller(daemon.folder / "agentd.sock")
    for n in range(count):
        body = {**BODY, "kernel_id": f"k{n}", "slots": {"cpu": 0, "mem": "8m"}}
        await agentd.call("POST", "/v1/agents/agent-1/kernels", body)
    await agentd.session.close()
    durations = [await started(daemon) for _ in range(5)]
    assert len(await daemon.get("/v1/kernels")) == count
    return {
        "empty": spread([duration for duration, _ in pairs]),
        "import": spread([duration for _, duration in pairs]),
        "ratio_to_import": round(statistics.median(a / b for a, b in pairs), 3),
        "containers": count,
        "with_containers": spread(durations),
        "ms_per_container": round((statistics.median(durations) - empty) * 1000 / count, 3),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--containers", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="agentd-bench-", dir="/tmp"))
    (folder / "engine").mkdir()
    (folder / "real").mkdir()
    (folder / "stand-in").mkdir()
    results: dict[str, Any] = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    engine = Engine(folder / "engine")
    engine.start()
    try:
        engine.import_image()
        results["own_share"], config = await own_share(folder / "stand-in", 300)
        daemon = cold(Daemon(folder / "real", "docker", engine))
        await daemon.start(AGENTS + gpus())
        results["idle_pss_mib"] = pss_mib(daemon.process.pid)
        results["create"] = await pairs(daemon, engine, config, options.pairs)
        results["create_8_at_once"] = await at_once(daemon, engine, config, options.pairs // 4)
        results["pss_after_mib"] = pss_mib(daemon.process.pid)
        results["start_to_ready"] = await start_to_ready(daemon, options.containers)
        await daemon.stop()
        daemon.notes.close()
    finally:
        engine.clean()
        engine.end()
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    asyncio.run(main())
