"""A real headless Chromium at the status page."""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright

from daemon import Daemon

PROGRAM = shutil.which("chromium")
PATIENCE_MS = 20_000


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start one; skipped where there is none, if that is allowed."""
    if PROGRAM is None:
        (pytest.fail if os.environ.get("AGENTD_REQUIRE_ALL") else pytest.skip)("no chromium")
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
async def shown_by(*options: str) -> AsyncIterator[str]:
    """Run `agentctl ui`, and give its address."""
    program = Path(sys.executable).with_name("agentctl")
    process = await asyncio.create_subprocess_exec(
        program, *options, "ui", "--print",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
    finally:
        process.terminate()
        await process.wait()


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
async def visit(browser: Browser, address: str, **options: Any) -> AsyncIterator[Visit]:
    """Look at a page in a context of its own, and see that nothing went wrong on it."""
    context = await browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **options})
    visited = Visit(await context.new_page())
    await visited.open(address)
    yield visited
    assert not visited.errors
    await context.close()
