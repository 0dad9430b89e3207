"""The status page with 64 GPUs, 256 cores and 1,000 kernels: tasks that hold the browser up.

`python benchmarks/page.py [--json]` needs chromium. The node is made up, so that what is measured
is the page: twenty kernels change each second, figures of all come every five, and somebody
scrolls, searches and points. Printed are the longest task and how many were over 100 ms
(Long Tasks API, https://www.w3.org/TR/longtasks-1/), in milliseconds.
"""

import argparse
import asyncio
import contextlib
import json
import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from playwright.async_api import Page, async_playwright

from agentd.http.static import HOME, Pages

GPUS, CORES, KERNELS, SECONDS, CHANGES = 64, 256, 1000, 40, 20
AGENTS = [f"team-{letter}" for letter in "abcdefgh"]


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class SimulatedNode:
    """A node that is made up."""

    def __init__(self) -> None:
        self.began = time.time()
        self.changed = 0
        self.kernels = [self.kernel(number) for number in range(KERNELS)]

    def kernel(self, number: int, state: str = "running") -> dict[str, Any]:
        amounts = {"cuda.shares": {f"cuda{number % GPUS}": "0.06"}}
        cores = {"cpu": {str(number % CORES): "0.25"}}
        return {
            "kernel_id": f"kernel-{number}", "agent_id": AGENTS[number % 8], "state": state,
            "slots": {"cuda.shares": "0.06", "cpu": "0.25", "mem": str(2**30)},
            "allocation": {"cuda": amounts, "cpu": cores}, "unknown_slots": {}, "degraded": [],
            "ports": [], "container_id": None, "pid": number, "created_at": at(self.began - number),
            "started_at": at(self.began), "finished_at": None, "exit_code": None,
            "oom_killed": False, "pull": None, "reason": "", "not_enforced": [],
            "created_by": "me", "image": "train:1", "command": ["train"], "labels": {"n": "1"},
        }  # fmt: skip

    def device(self, name: str, number: int, slot: str, amount: str) -> dict[str, Any]:
        device_id = f"cuda{number}" if name == "cuda" else str(number)
        count = GPUS if name == "cuda" else CORES
        holders = [k["kernel_id"] for k in self.kernels[number::count]]
        used = len(holders) * float(amount)
        return {
            "device_name": name, "id": device_id, "stable_id": f"x-{name}-{number}", "aliases": [],
            "agents": AGENTS, "state": "ok", "reason": "", "numa_node": number * 2 // count,
            "model": "made up", "slot": slot, "capacity": "1", "allocated": f"{used:.2f}",
            "free": f"{1 - used:.2f}",
            "holders": [{"kernel_id": k, "amount": amount} for k in holders],
        }  # fmt: skip

    def answer(self, path: str) -> Any:  # noqa: PLR0911 - one for each route
        slots = ("cpu", "cuda.shares", "mem")
        use = {slot: {"capacity": "64", "allocated": "8", "free": "56"} for slot in slots}
        match path:
            case "/v1/whoami":
                return {"name": "me", "role": "admin", "agents": None, "uid": 0}
            case "/v1/node":
                runtime = {"name": "docker", "state": "available", "reason": ""}
                return {"id": "made-up", "version": "0", "runtime": runtime, "other_runtimes": [],
                        "plugins": [], "warnings": [], "generation": 1}  # fmt: skip
            case "/v1/devices":
                return [self.device("cuda", n, "cuda.shares", "0.06") for n in range(GPUS)] + [
                    self.device("cpu", n, "cpu", "0.25") for n in range(CORES)
                ]
            case "/v1/agents":
                common = {"devices": {}, "scaling_factors": {}, "limits": {}, "slots": use}
                return [{"agent_id": agent, **common} for agent in AGENTS]
            case "/v1/slot-types":
                return [{"name": slot, "kind": "count"} for slot in slots]
            case "/v1/kernels":
                return self.kernels
            case "/v1/stats":
                return [self.use(number) for number in range(KERNELS)]
        return []

    def use(self, number: int) -> dict[str, Any]:
        now = time.time()
        device = {"device_name": "cuda", "id": f"cuda{number % GPUS}", "utilization": 0.5}
        return {"kernel_id": f"kernel-{number}", "at": at(now), "cpu_seconds": now % 1e5 * 0.2,
                "memory_bytes": 2**28 + number * 2**16, "memory_limit_bytes": 2**30,
                "devices": [device]}  # fmt: skip

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if (page := pages.response_for(request)) is not None:
            return page
        if request.path != "/v1/events":
            return web.json_response(self.answer(request.path))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(1 / CHANGES)
            self.changed += 1
            state = ("stopping", "running")[self.changed % 2]
            number = self.changed * 7 % KERNELS
            self.kernels[number] = self.kernel(number, state)
            message = json.dumps(self.kernels[number])
            with contextlib.suppress(ConnectionError):
                message = f"id: x-{self.changed}\nevent: kernel\ndata: {message}\n\n"
                await response.write(message.encode())
        return response


pages = Pages({HOME: "agentd"})
OBSERVE = """
window.tasks = [];
const note = (list) => window.tasks.push(...list.getEntries().map((task) => task.duration));
new PerformanceObserver(note).observe({ type: "longtask", buffered: true });
"""


async def use_page(page: Page) -> None:
    """Do what people do, for a while."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for position in (2000, 20000, 35000, 0):
            await page.evaluate(f"document.getElementById('rows').scrollTop = {position}")
            await asyncio.sleep(0.4)
        await page.hover(".kernel >> nth=3")
        await page.locator('.cell[aria-label^="cuda cuda7"]').first.hover()
        await page.fill("#find", "kernel-77")
        await asyncio.sleep(0.5)
        await page.fill("#find", "")
        await page.click("#head button:has-text('CPU')")
        await asyncio.sleep(1)


async def measure() -> dict[str, Any]:
    """Return what the browser says of its longest tasks."""
    node = SimulatedNode()
    runner = web.ServerRunner(web.Server(node.serve))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = await browser.new_page(viewport={"width": 1440, "height": 1000})
        await page.add_init_script(OBSERVE)
        await page.goto(f"http://127.0.0.1:{port}/ui/")
        await page.wait_for_selector("#main:not([hidden])")
        first_tasks = await page.evaluate("tasks.splice(0)")
        await use_page(page)
        tasks = sorted(await page.evaluate("tasks"))
        heap = await page.evaluate("performance.memory.usedJSHeapSize")
        await browser.close()
    await runner.cleanup()
    return {
        "first_view_longest_ms": max(first_tasks, default=0),
        "longest_ms": max(tasks, default=0),
        "over_50_ms": len(tasks),
        "over_100_ms": sum(1 for task in tasks if task > 100),
        "seconds": SECONDS,
        "heap_mib": round(heap / 2**20, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = asyncio.run(measure())
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
