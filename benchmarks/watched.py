"""What it costs the daemon to be watched: real kernels, a scrape each ten seconds, three pages.

    python benchmarks/watched.py [--kernels 1000] [--seconds 60] [--json]

Needs root and chromium. Prints how long `GET /v1/stats` and a scrape take (medians, in
milliseconds), the daemon's processor time as a part of one core while nobody watches and while it
is watched, and its memory (PSS).
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from create import AGENTS, ROOT, Caller, processor_s, pss_mib
from playwright.async_api import async_playwright

sys.path.insert(0, str(ROOT / "tests"))
from end_to_end.browser import shown
from support.daemon import Daemon, gpus

AT_ONCE = 4


async def time_call(caller: Caller, path: str) -> float:
    before = time.perf_counter()
    async with caller.session.get(f"http://x{path}") as response:
        await response.read()
    return time.perf_counter() - before


async def median_ms(caller: Caller, path: str) -> float:
    """Return the median; statistics are kept for a second, so each look is a new one."""
    durations = []
    for _ in range(9):
        await asyncio.sleep(1.1)
        durations.append(await time_call(caller, path))
    return round(statistics.median(durations) * 1000, 1)


async def measure(kernels: int, seconds: float) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="agentd-", dir="/tmp"))
    folder.chmod(0o755)
    daemon = Daemon(folder, "process")
    await daemon.start(AGENTS + gpus(64))
    names = iter(range(kernels))

    async def create() -> None:
        for number in names:
            await daemon.create(
                kernel_id=f"k{number}", command=["sleep", "100000"], slots={"cpu": 0, "mem": "4m"}
            )

    await asyncio.gather(*(create() for _ in range(AT_ONCE)))
    caller = Caller(folder / "agentd.sock")
    pid = daemon.process.pid
    results: dict[str, Any] = {"kernels": len(await caller.call("GET", "/v1/kernels"))}

    async def load() -> float:
        before, start = processor_s(pid), time.monotonic()
        await asyncio.sleep(seconds)
        return round((processor_s(pid) - before) / (time.monotonic() - start), 4)

    async def scrape() -> None:
        while True:
            await time_call(caller, "/metrics")
            await time_call(caller, "/v1/stats")
            await asyncio.sleep(10)

    try:
        results["stats_ms"] = await median_ms(caller, "/v1/stats")
        results["scrape_ms"] = await median_ms(caller, "/metrics")
        results["pss_mib"] = pss_mib(pid)
        results["cores_unwatched"] = await load()
        async with async_playwright() as playwright, shown(daemon) as address:
            browser = await playwright.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
            for _ in range(3):
                page = await (await browser.new_context()).new_page()
                await page.goto(address)
                await page.wait_for_selector("#main:not([hidden])")
            scraping = asyncio.create_task(scrape())
            results["cores_watched"] = await load()
            scraping.cancel()
            await browser.close()
        results["pss_mib_watched"] = pss_mib(pid)
    finally:
        await caller.session.close()
        await daemon.close()
        shutil.rmtree(folder, ignore_errors=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(
        json.dumps(
            asyncio.run(measure(options.kernels, options.seconds)),
            indent=None if options.json else 2,
        )
    )
