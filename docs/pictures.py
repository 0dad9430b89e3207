"""Take the pictures of the documentation: `python docs/pictures.py` (needs chromium).

The status page of a node (light, dark, a kernel, a phone), the page of a fleet, and the output of
`make demo` as an SVG of a terminal. Everything runs on simulated devices, in a temporary folder.
"""

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.async_api import async_playwright
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent / "pictures"
CONFIG = """
[node]
id = "{name}"
state-dir = "{folder}/state"
runtime = "process"
[rpc]
socket = "{folder}/agentd.sock"
[host]
cpus = 32
mem = "512g"
[[agents]]
id = "research"
[[agents]]
id = "inference"
[[agents]]
id = "teaching"
[plugins]
allow = ["sim"]
[plugins.{plugin}]
plugin = "sim"
count = {count}
mode = "{mode}"
numa-nodes = 2
health-file = "{folder}/health"
"""
WORK = """n=0; while :; do i=0; t=$((n % 80)); [ $t -gt 40 ] && t=$((80 - t))
while [ $i -lt $(({busy} * t / 20)) ]; do i=$((i+1)); done; echo step $((n=n+1)); sleep 0.5; done"""
AGENTS = ("research", "inference", "teaching")
CURVES_S = 120
"""Seconds of curves on a picture of a node."""
START_S = 60


def program(name: str) -> str:
    """Return the path of a program of this environment."""
    return str(Path(sys.executable).with_name(name))


def agentctl(folder: Path, *words: str) -> list[str]:
    """Return a command of agentctl."""
    return [program("agentctl"), "--socket", str(folder / "agentd.sock"), *words]


def answers(command: list[str]) -> bool:
    """Return whether a command ends with status 0 within START_S."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return True
        time.sleep(0.2)
    return False


@contextlib.contextmanager
def node(folder: Path, name: str, plugin: str, count: int, mode: str) -> Iterator[Path]:
    """Run a node on simulated devices; remove its kernels at the end."""
    folder.mkdir(mode=0o755)
    (folder / "health").write_text("cuda5 unhealthy Xid 79: the GPU has fallen off the bus\n")
    config = folder / "agent.toml"
    config.write_text(
        CONFIG.format(name=name, folder=folder, plugin=plugin, count=count, mode=mode)
    )
    command = [program("agentd"), "run", "--config", str(config)]
    with subprocess.Popen(command, env=clean(), stderr=subprocess.DEVNULL) as daemon:
        assert answers(agentctl(folder, "status"))
        try:
            yield folder
        finally:
            listing = subprocess.run(
                agentctl(folder, "ls", "-o", "json"), capture_output=True, check=True
            )
            ids = [kernel["kernel_id"] for kernel in json.loads(listing.stdout)]
            if ids:
                subprocess.run(agentctl(folder, "rm", "--timeout", "0", *ids), check=False)
            daemon.terminate()


def clean() -> dict[str, str]:
    """Return the environment without settings of agentd."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AGENT")}


def busy(folder: Path) -> None:
    """Give a node of eight shared GPUs nine kernels, a refusal, and a drained device."""
    for number in range(9):
        agent = AGENTS[number % 3]
        share = ("1", "0.5", "2", "1", "0.25")[number % 5]
        work = WORK.format(busy=(number * 571) % 6000)
        slots = ["-s", f"cuda.shares={share}", "-s", "cpu=2", "-s", "mem=4g"]
        options = ["--id", f"{agent}-{number}", *slots]
        create = agentctl(folder, "create", agent, *options, "--", "sh", "-c", work)
        subprocess.run(create, stdout=subprocess.DEVNULL, check=False)
    refused = ("create", "teaching", "--id", "lecture", "-s", "cuda.shares=8", "--", "true")
    subprocess.run(agentctl(folder, *refused), capture_output=True, check=False)
    subprocess.run(agentctl(folder, "drain", "cuda6"), capture_output=True, check=True)


async def take(command: list[str], wait_s: float, pictures: dict[str, dict[str, object]]) -> None:
    """Take pictures of one page, each in a browser context with its own options."""
    page_server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert page_server.stdout is not None
    address = (await page_server.stdout.readline()).decode().strip()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        pages = {}
        for name, options in pictures.items():
            page = await (await browser.new_context(**options)).new_page()
            await page.goto(address)
            pages[name] = page
        await asyncio.sleep(wait_s)
        for name, page in pages.items():
            if name.endswith("kernel"):
                await page.click("#rows .kernel button >> nth=2")
                await asyncio.sleep(1)
            await page.screenshot(path=FOLDER / f"{name}.png")
        await browser.close()
    page_server.terminate()
    await page_server.wait()


def take_node(folder: Path) -> None:
    """Take the page of one node with eight GPUs."""
    wide, tall = {"width": 1440, "height": 960}, {"width": 390, "height": 844}
    with node(folder / "node", "gpu-node-07", "cuda", 8, "shares") as node_folder:
        busy(node_folder)
        pictures: dict[str, dict[str, object]] = {
            "page-8-gpus": {"viewport": wide},
            "page-8-gpus-dark": {"viewport": wide, "color_scheme": "dark"},
            "page-kernel": {"viewport": wide},
            "page-phone": {"viewport": tall},
        }
        asyncio.run(take(agentctl(node_folder, "ui", "--print"), CURVES_S, pictures))


def take_fleet(folder: Path) -> None:
    """Take the page of three nodes with different devices."""
    kinds = (
        ("gpu-node-01", "cuda", 8, "device"),
        ("gpu-node-02", "rocm", 4, "device"),
        ("npu-node-01", "npu", 2, "shares"),
    )
    with contextlib.ExitStack() as stack:
        for name, plugin, count, mode in kinds:
            stack.enter_context(node(folder / name, name, plugin, count, mode))
        addresses = ", ".join(f'"unix:{folder}/{name}/agentd.sock"' for name, *_ in kinds)
        config = folder / "fleet.toml"
        config.write_text(
            f'[fleet]\nnodes = [{addresses}]\n[gateway]\nsocket = "{folder}/gateway.sock"\n'
            f'state-dir = "{folder}/gateway"\n'
        )
        command = [program("agentd-fleet"), "gateway", "--config", str(config)]
        gateway = stack.enter_context(
            subprocess.Popen(command, env=clean(), stderr=subprocess.DEVNULL)
        )
        stack.callback(gateway.terminate)
        fleet = [program("agentctl"), "--fleet", f"unix:{folder}/gateway.sock"]
        assert answers([*fleet, "fleet", "nodes"])
        for number, slots in enumerate(("cuda.device=2", "cuda.device=1", "rocm.device=2")):
            name = f"train-{number + 1}"
            create = [*fleet, "create", "--agent", "research", "--id", name, "-s", slots]
            subprocess.run([*create, "--", "sleep", "1000"], stdout=subprocess.DEVNULL, check=True)
        wide = {"viewport": {"width": 1440, "height": 420}}
        asyncio.run(take([*fleet, "ui", "--print"], 10, {"page-fleet": wide}))


def take_demo() -> None:
    """Run `make demo`, and draw its output as a terminal."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(Path(__file__).parent / "start" / "demo.sh")],
        env={**clean(), "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
    console = Console(record=True, width=120, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    console.save_svg(str(FOLDER / "demo.svg"), title="make demo")


def main() -> None:
    """Take all of them."""
    FOLDER.mkdir(exist_ok=True)
    take_demo()
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        take_fleet(folder)
        take_node(folder)


if __name__ == "__main__":
    main()
