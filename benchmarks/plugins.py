"""What it costs that plugins live in processes of their own, against threads of the daemon.

    python benchmarks/plugins.py [--rounds 20] [--json]

For each plugin: the memory (PSS) of its process beside that of a bare interpreter, the time
from nothing to a listing, and the time of a call, each against the same plugin imported and
called right here. NVML is the library of the tests, with eight GPUs (needs gcc).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from create import pss_mib

from agentd.plugin_api import AllocatedDevice, Features
from agentd.pluginhost.entry_points import EntryPoints, installed_entry_points
from agentd.pluginhost.process import PluginProcess
from agentd.pluginhost.protocol import DeviceListing

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from native.libraries import built

GPU = (
    "gpu uuid=GPU-{n} pci=00000000:{n:02X}:00.0 mem=85899345920 used=1024 util=7 temp=41 "
    "power=70500 lost=0 mig=0 recovery=0 events=8 name=NVIDIA H100 80GB HBM3\n"
)
DOCKER = Features("docker")
IN_PROCESS = """
import importlib, json, sys, time
from agentd.plugin_api import AllocatedDevice, Features
before = time.perf_counter()
module, name = sys.argv[1].split(":")
plugin = getattr(importlib.import_module(module), name)("x", json.loads(sys.argv[2]))
plugin.open()
plugin.slot_types()
devices = list(plugin.list_devices())
took = [time.perf_counter() - before]
given = [AllocatedDevice(d.id, d.stable_id, d.slot, "1") for d in devices[:2]]
for _ in range(100):
    before = time.perf_counter()
    plugin.container_edits(given, Features("docker"))
    took.append(time.perf_counter() - before)
print(json.dumps(took))
"""


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(second * 1000 for second in seconds)
    return {
        "median_ms": round(statistics.median(ordered), 3),
        "min_ms": round(ordered[0], 3),
        "max_ms": round(ordered[-1], 3),
    }


def bare_interpreter_mib() -> float:
    program = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory_mib = pss_mib(process.pid)
        process.kill()
    return memory_mib


async def start_process(
    target: str, settings: dict[str, Any]
) -> tuple[PluginProcess, DeviceListing, float]:
    before = time.perf_counter()
    process = await PluginProcess.start("x", target, settings, lambda: None)
    for step in ("load", "validate", "open"):
        await process.call(step, timeout_s=10)
    listing = await process.call("listing", timeout_s=10)
    return process, listing, time.perf_counter() - before


def in_process(target: str, settings: dict[str, Any]) -> list[float]:
    """Return seconds: to a listing, and then for each of a hundred calls."""
    command = [sys.executable, "-c", IN_PROCESS, target, json.dumps(settings)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(second) for second in json.loads(output)]


async def measure(target: str, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    process_times: list[float] = []
    in_process_times: list[float] = []
    process_calls: list[float] = []
    in_process_calls: list[float] = []
    for _ in range(rounds):
        listing_time, *calls = in_process(target, settings)
        in_process_times.append(listing_time)
        in_process_calls += calls
        process, listing, start_time = await start_process(target, settings)
        process_times.append(start_time)
        devices = [AllocatedDevice(d.id, d.stable_id, d.slot, "1") for d in listing.devices[:2]]
        for _ in calls:
            before = time.perf_counter()
            await process.call("container_edits", devices, DOCKER, timeout_s=10)
            process_calls.append(time.perf_counter() - before)
        memory = pss_mib(process.pid)
        await process.kill("measured")
    return {
        "devices": len(listing.devices),
        "pss_mib": memory,
        "start": {
            "process": milliseconds(process_times),
            "in_process": milliseconds(in_process_times),
        },
        "edits": {
            "process": milliseconds(process_calls),
            "in_process": milliseconds(in_process_calls),
        },
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built("nvml.c", Path(folder) / "libnvidia-ml.so.1")
        gpus = Path(folder) / "gpus"
        gpus.write_text("driver 570.124.06\ninit 0\n" + "".join(GPU.format(n=n) for n in range(8)))
        settings: dict[str, dict[str, Any]] = {
            "sim": {"count": 8},
            "generic": {"devices": ["/dev/tty[1-8]"]},
            "cuda": {},
        }
        os.environ |= {"FAKE_NVML_FILE": str(gpus), "LD_LIBRARY_PATH": folder}
        points = EntryPoints(installed_entry_points())
        results: dict[str, Any] = {"bare_interpreter_pss_mib": bare_interpreter_mib()}
        for name, table in settings.items():
            results[name] = await measure(points.target(name), table, options.rounds)
    print(json.dumps(results, indent=None if options.json else 2))


if __name__ == "__main__":
    asyncio.run(main())
