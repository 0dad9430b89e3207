"""A real headless Chromium at the status page."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright

from support.daemon import Daemon
from support.fork_server import spawn
from support.needs import require

PROGRAM = shutil.which("chromium")
PATIENCE_MS = 20_000
STATS_MS = 5000
"""Milliseconds between two readings of usage by a node's page."""
NODES_MS = 3000
"""Milliseconds between two readings of nodes by a fleet's page."""


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start Chromium."""
    require("chromium")
    # Root has no other way, and these pages are ours.
    plain = ["--no-sandbox", "--disable-dev-shm-usage"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PROGRAM, args=plain)
        yield browser
        await browser.close()


@contextlib.asynccontextmanager
async def shown(daemon: Daemon) -> AsyncIterator[str]:
    """Run `agentctl ui` for a node, and give its address."""
    async with shown_by("--socket", str(daemon.folder / "agentd.sock")) as address:
        yield address


@contextlib.asynccontextmanager
async def shown_by(
    *options: str, deadlines: Mapping[str, float] = MappingProxyType({})
) -> AsyncIterator[str]:
    """Run `agentctl ui`, and give its address."""
    ours, theirs = os.pipe()
    words = [*options, "ui", "--print"]
    ends = {"stdout": theirs, "stderr": 2}
    process = spawn("agentctl", words, os.environ, **ends, deadlines=deadlines)
    os.close(theirs)
    try:
        with open(ours, "rb") as printed:  # noqa: PTH123 - a descriptor is opened
            yield (await asyncio.to_thread(printed.readline)).decode().strip()
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 20)


class Visit:
    """A page that is looked at; all that it asks for, and what goes wrong on it, is kept."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "console", lambda said: self.errors.append(said.text) if said.type == "error" else 0
        )
        page.set_default_timeout(PATIENCE_MS)

    async def open(self, address: str) -> None:
        await self.page.goto(address)
        await self.page.wait_for_selector("#main:not([hidden])")

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def until(self, selector: str, text: str, timeout_ms: int = PATIENCE_MS) -> None:
        """Wait until a text stands in something."""
        has = "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)"
        await self.page.wait_for_function(has, arg=[selector, text], timeout=timeout_ms)

    async def next_reading(self, path: str, pause_ms: int) -> None:
        """Advance the page's fake clock by a pause, and wait for the answer that it triggers."""
        async with self.page.expect_response(lambda answer: answer.url.endswith(path)):
            await self.page.clock.fast_forward(pause_ms)

    def cell(self, name: str) -> Any:
        """Return the cell of a device."""
        return self.page.locator(f'.cell[aria-label^="{name}"]')

    async def faults(self) -> list[str]:
        """Return what axe calls serious or worse."""
        found = await Axe().run(self.page)
        return [
            f"{rule['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for rule in found.response["violations"]
            if rule["impact"] in ("serious", "critical")
            for node in rule["nodes"][:3]
        ]


@contextlib.asynccontextmanager
async def visit(
    browser: Browser, address: str, *, has_clock: bool = False, **options: Any
) -> AsyncIterator[Visit]:
    """Open a page in a context of its own, and check that nothing went wrong on it.

    With `has_clock` the test can fast-forward the time of the page.
    """
    async with context(browser, **options) as visited:
        if has_clock:
            await visited.page.clock.install()
        await visited.open(address)
        yield visited
        assert not visited.errors


@contextlib.asynccontextmanager
async def context(browser: Browser, **options: Any) -> AsyncIterator[Visit]:
    """Create a context with one page, and close it."""
    made = await browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **options})
    try:
        yield Visit(await made.new_page())
    finally:
        await made.close()
