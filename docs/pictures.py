"""Take the pictures of the status page: `python docs/pictures.py` (needs chromium)."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.async_api import async_playwright

FOLDER = Path(__file__).parent / "pictures"
CONFIG = """
[node]
id = "gpu-node-07"
state-dir = "{folder}/state"
runtime = "process"
[rpc]
socket = "{folder}/agentd.sock"
[host]
cpus = {cpus}
mem = "512g"
[[agents]]
id = "research"
[[agents]]
id = "inference"
[[agents]]
id = "teaching"
[plugins.cuda]
plugin = "sim"
count = {gpus}
mode = "shares"
numa-nodes = 2
health-file = "{folder}/health"
"""
WORK = """n=0; while :; do i=0; t=$((n % 80)); [ $t -gt 40 ] && t=$((80 - t))
while [ $i -lt $(({busy} * t / 20)) ]; do i=$((i+1)); done; echo step $((n=n+1)); sleep 0.5; done"""
AGENTS = ("research", "inference", "teaching")
CURVES_S = 180


def agentctl(folder: Path, *words: str) -> list[str]:
    """Return a command of agentctl."""
    program = Path(sys.executable).with_name("agentctl")
    return [str(program), "--socket", str(folder / "agentd.sock"), *words]


@contextlib.contextmanager
def node(gpus: int, cpus: int, kernels: int) -> Iterator[Path]:
    """Run a node with kernels, some of which are refused."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "health").write_text("cuda5 unhealthy Xid 79: the GPU has fallen off the bus\n")
        config = folder / "agent.toml"
        config.write_text(CONFIG.format(folder=folder, gpus=gpus, cpus=cpus))
        program = [sys.executable, "-m", "agentd", "run", "--config", str(config)]
        env = {**os.environ, "AGENTD__PLUGINS__ALLOW": '["sim"]'}
        with subprocess.Popen(program, env=env, stderr=subprocess.DEVNULL) as daemon:
            while subprocess.run(
                agentctl(folder, "ls"), capture_output=True, check=False
            ).returncode:
                pass
            for number in range(kernels):
                agent = AGENTS[number % 3]
                share = ("1", "0.5", "2", "1", "0.25")[number % 5]
                work = WORK.format(busy=(number * 3571) % 60000)
                slots = ["-s", f"cuda.shares={share}", "-s", "cpu=2", "-s", "mem=4g"]
                options = ["--id", f"{agent[:5]}-{number:02}", *slots]
                subprocess.run(
                    agentctl(folder, "create", agent, *options, "--", "sh", "-c", work),
                    stdout=subprocess.DEVNULL, check=False,
                )  # fmt: skip
            subprocess.run(
                agentctl(folder, "create", "teaching", "--id", "lecture", "-s", f"cuda.shares={gpus}", "--", "true"),
                capture_output=True, check=False,
            )  # fmt: skip
            subprocess.run(agentctl(folder, "drain", "cuda6"), capture_output=True, check=True)
            try:
                yield folder
            finally:
                listed = subprocess.run(
                    agentctl(folder, "ls", "--json"), capture_output=True, check=True
                )
                ids = [kernel["kernel_id"] for kernel in json.loads(listed.stdout)]
                for kernel in ids:
                    subprocess.run(agentctl(folder, "rm", kernel), capture_output=True, check=False)
                daemon.terminate()


async def take(folder: Path, pictures: dict[str, dict[str, object]]) -> None:
    """Take pictures of one node, each with its way of looking."""
    program = agentctl(folder, "ui", "--print")
    shown = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    address = (await shown.stdout.readline()).decode().strip()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        pages = {}
        for name, look in pictures.items():
            page = await (await browser.new_context(**look)).new_page()
            await page.goto(address)
            pages[name] = page
        await asyncio.sleep(CURVES_S)
        for name, page in pages.items():
            if name.endswith("kernel"):
                await page.click("#rows .kernel button >> nth=2")
                await asyncio.sleep(1)
            await page.screenshot(path=FOLDER / f"{name}.png")
        await browser.close()
    shown.terminate()
    await shown.wait()


def main() -> None:
    """Take all of them."""
    FOLDER.mkdir(exist_ok=True)
    wide, tall = {"width": 1440, "height": 960}, {"width": 390, "height": 844}
    with node(8, 32, 9) as folder:
        asyncio.run(take(folder, {
            "page-8-gpus": {"viewport": wide},
            "page-8-gpus-dark": {"viewport": wide, "color_scheme": "dark"},
            "page-kernel": {"viewport": wide},
            "page-phone": {"viewport": tall},
        }))  # fmt: skip
    with node(64, 256, 40) as folder:
        asyncio.run(take(folder, {"page-64-gpus": {"viewport": {"width": 1440, "height": 1100}}}))


if __name__ == "__main__":
    main()
