"""Drawing of the status page: positions of devices, hatching, curves."""

import pytest
from playwright.async_api import Browser

from end_to_end.browser import STATS_MS, shown, visit
from support.daemon import AGENTS, Daemon, gpus

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONFIG = """
[[agents]]
id = "research"
[plugins.cuda]
plugin = "sim"
devices = [{devices}]
health-file = "{health}"
"""
BACKGROUND = "cell => getComputedStyle(cell, '::after').backgroundImage"
DRAWN = """([selector]) => {
  const { width, height } = document.querySelector(selector) ?? {};
  if (!width) return false;
  const context = document.querySelector(selector).getContext("2d");
  return context.getImageData(0, 0, width, height).data.some((value) => value > 0);
}"""


async def test_page_orders_devices_by_numa_and_hatches_withheld(
    plain: Daemon, browser: Browser
) -> None:
    health = plain.folder / "health"
    health.write_text("cuda10 unhealthy it coughs\n")
    devices = ", ".join(f'{{id = "cuda{n}", numa-node = {n % 2}}}' for n in (0, 1, 2, 3, 10))
    await plain.start(CONFIG.replace("{devices}", devices).replace("{health}", str(health)))
    async with shown(plain) as address, visit(browser, address) as page:
        row = page.page.locator('[aria-label="devices cuda"]')
        assert await row.locator(".numa").all_inner_texts() == ["NUMA 0", "NUMA 1"]
        cells = row.locator(".cell")
        names = await cells.locator(".name").all_inner_texts()
        assert names == ["cuda0", "cuda2", "cuda10", "cuda1", "cuda3"]
        await plain.call("POST", "/v1/devices/cuda/cuda3/drain")
        await row.locator('[data-state="drained"]').wait_for()
        hatched = [
            "repeating-linear-gradient" in await cell.evaluate(BACKGROUND)
            for cell in await cells.all()
        ]
        assert hatched == [False, False, True, False, True]
        legend = await page.text("#legend")
        assert "unhealthy" in legend
        assert "drained" in legend


async def test_page_draws_usage_curves_of_a_kernel(plain: Daemon, browser: Browser) -> None:
    plain.deadlines = {"agentd.services.statistics.MAX_AGE_S": 0.0}
    await plain.start()
    busy = ["sh", "-c", "while :; do :; done"]
    await plain.running(kernel_id="busy", command=busy, slots={"cpu": 1})
    async with shown(plain) as address, visit(browser, address, has_clock=True) as page:
        for _ in range(2):
            await page.next_reading("/v1/stats", STATS_MS)
        for figure in ("cpu", "memory"):
            await page.page.wait_for_function(DRAWN, arg=[f".kernel .c-{figure} canvas"])
        assert await page.text(".kernel .c-cpu span") not in ("", "-")
        await page.page.click("text=busy")
        await page.page.wait_for_function(DRAWN, arg=["#details .curves canvas"])


@pytest.mark.parametrize("width", [1024, 1600])
async def test_page_shows_all_devices_of_a_kernel(
    plain: Daemon, browser: Browser, width: int
) -> None:
    await plain.start(AGENTS + gpus(8))
    await plain.running(kernel_id="k1", slots={"cpu": 1, "mem": "64m", "cuda.device": 8})
    viewport = {"width": width, "height": 800}
    async with shown(plain) as address, visit(browser, address, viewport=viewport) as page:
        cell = page.page.locator(".kernel .c-has")
        await cell.wait_for()
        assert (await cell.inner_text()).startswith("8 cuda")
        is_whole = "e => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight + 1"
        assert await cell.evaluate(is_whole)
