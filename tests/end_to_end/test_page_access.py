"""Access to the status page and its content."""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from playwright.async_api import Browser
from yarl import URL

from end_to_end.browser import STATS_MS, Visit, context, shown, shown_by
from end_to_end.test_tokens import Tokens, tokens

__all__ = ["tokens"]
pytestmark = pytest.mark.asyncio(loop_scope="session")
SLEEPER = ["sleep", "100000"]


@pytest.fixture
async def node(tokens: Tokens) -> Tokens:
    """A node of two teams, with a kernel each, that listens on TCP."""
    team = tokens.entry("team", "agent", "team-a")
    tokens.configure(team, tokens.entry("watcher", "read"), tokens.entry("boss", "admin"))
    await tokens.daemon.start()
    for agent, which in (("team-a", "a"), ("secret-team", "b")):
        kernel = {"kernel_id": f"of-{which}", "slots": {"cuda.device": 1}, "command": SLEEPER}
        await tokens.daemon.running(agent, **kernel)
        await tokens.daemon.create(agent, kernel_id=f"big-{which}", slots={"cpu": 99})
    return tokens


@contextlib.asynccontextmanager
async def logged_in(browser: Browser, node: Tokens, name: str) -> AsyncIterator[Visit]:
    async with context(browser) as page:
        await page.page.clock.install()
        await page.page.goto(f"http://127.0.0.1:{node.port}/")
        await page.page.fill("#token", "wrong")
        await page.page.click("#login button")
        await page.until("#login-problem", "not known here")
        await page.page.fill("#token", node.secrets[name])
        await page.page.click("#login button")
        await page.page.wait_for_selector("#main:not([hidden])")
        yield page


async def test_a_team_sees_what_is_its_own_and_may_stop_that(
    node: Tokens, browser: Browser
) -> None:
    async with logged_in(browser, node, "team") as page:
        await page.until("#rows", "of-a")
        assert "of-b" not in await page.text("body")
        assert "big-b" not in await page.text("body")
        assert "secret-team" not in await page.page.content()
        assert "big-a" in await page.text("#refusals")
        assert "you are team (agent)" in await page.text("#facts")
        await page.page.click("text=of-a")
        await page.page.wait_for_selector("#details button:has-text('Stop')")
        await page.page.keyboard.press("Escape")
        await page.page.locator('.cell[aria-label^="cuda"]').first.click()
        await page.until("#details", "cuda")
        assert await page.page.locator("#details .buttons button").count() == 0
        await page.page.keyboard.press("Escape")
        await page.page.reload()
        await page.until("#rows", "of-a")


async def test_a_team_sees_at_once_what_another_gives_back(node: Tokens, browser: Browser) -> None:
    async with logged_in(browser, node, "team") as page:
        await page.until("#rows", "of-a")
        cuda = page.page.locator('[aria-label="devices cuda"] .cell[aria-label*="other"]')
        assert await cuda.count() == 1
        before = len(page.asked)
        await node.daemon.call("POST", "/v1/kernels/of-b/stop", {"timeout": 0})
        await cuda.wait_for(state="detached")
        for _ in range(3):
            await page.next_reading("/v1/stats", STATS_MS)
        looks = [url for url in page.asked[before:] if url.endswith("/v1/devices")]
        assert len(looks) <= 2, "nothing but statistics is read by the clock"


async def test_page_offers_readers_no_actions(node: Tokens, browser: Browser) -> None:
    async with logged_in(browser, node, "watcher") as page:
        await page.until("#rows", "of-b")
        await page.page.click("text=of-b")
        await page.until("#details", "does not see what kernels print")
        assert await page.page.locator("#details .buttons button").count() == 0


async def test_the_files_need_no_token_and_are_held_to_themselves(node: Tokens) -> None:
    for path in ("/ui/", "/ui/app.js", "/ui/style.css", "/ui/icon.svg"):
        answer = await node.get(None, path)
        assert answer.status == 200, path
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert (await node.get(None, "/ui/nothing.js")).status == 401
    assert (await node.get(None, "/ui/../etc/passwd")).status in (401, 404)
    assert (await node.get(None, "/v1/kernels")).status == 401


async def test_the_files_are_refused_to_a_foreign_page_and_name(node: Tokens) -> None:
    port = node.port
    for headers in (
        {"Origin": "http://evil.example"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{port}"},
        {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"},
    ):
        for path in ("/ui/", "/ui/app.js", "/", "/v1/kernels"):
            answer = await node.get("boss", path, headers)
            assert (answer.status, answer.json["code"]) == (403, "Forbidden"), (path, headers)
    ours = {"Origin": f"http://127.0.0.1:{port}"}
    assert (await node.get("boss", "/v1/kernels", ours)).status == 200
    for host in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}", "node", "a.localhost:1"):
        assert (await node.get(None, "/ui/", {"Host": host})).status == 200, host


async def test_the_loopback_port_takes_its_token_and_no_other_name(node: Tokens) -> None:
    async with shown(node.daemon) as address, aiohttp.ClientSession() as session:
        url = URL(address)
        secret = url.fragment.removeprefix("token=")
        assert len(secret) >= 32
        assert url.host == "127.0.0.1"

        async def status(path: str, **headers: str) -> int:
            async with session.get(url.origin() / path, headers=headers) as answer:
                return answer.status

        bearer = f"Bearer {secret}"
        assert await status("ui/") == 200
        assert await status("v1/node") == 401
        assert await status("v1/node", Authorization="Bearer x") == 401
        assert await status("v1/node", Authorization=bearer) == 200
        assert await status("v1/kernels/none", Authorization=bearer) == 404
        assert await status("v1/node", Authorization=bearer, Host="evil.example") == 403
        assert await status("v1/node", Authorization=bearer, Origin="http://evil.example") == 403
        lines = [
            file.read_bytes()
            for file in Path("/proc").glob("[0-9]*/cmdline")
            if b"agentctl" in read(file)
        ]
        assert not any(secret.encode() in line for line in lines)


def read(file: Path) -> bytes:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""


async def test_new_address_is_taken_by_the_old_tab(node: Tokens, browser: Browser) -> None:
    async with shown(node.daemon) as address, context(browser) as page:
        await page.page.goto(f"{address.partition('#')[0]}#token=of-the-command-before")
        await page.until("#login-problem", "not known here")
        await page.page.goto(address)  # differs in its fragment only, so nothing is loaded
        await page.page.wait_for_selector("#main:not([hidden])")
        for _ in range(2):
            assert "token" not in page.page.url
            await page.page.go_back()


async def test_half_a_body_does_not_hold_the_relay(node: Tokens) -> None:
    short = {"agentd.cli.agentctl.ui.BODY_TIMEOUT_S": 0.2}
    options = ("--socket", str(node.daemon.folder / "agentd.sock"))
    async with shown_by(*options, deadlines=short) as address:
        url = URL(address)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /v1/agents/team-a/kernels HTTP/1.1\r\nHost: {url.authority}\r\n"
        bearer = f"Authorization: Bearer {url.fragment.removeprefix('token=')}\r\n"
        writer.write(f"{head}{bearer}Content-Length: 10\r\n\r\nhalf".encode())
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()


async def test_a_daemon_that_goes_is_said_to_the_page(node: Tokens) -> None:
    async with shown(node.daemon) as address, aiohttp.ClientSession() as session:
        url = URL(address)
        headers = {"Authorization": f"Bearer {url.fragment.removeprefix('token=')}"}
        await node.daemon.stop()
        async with session.get(url.origin() / "v1/node", headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (502, "RuntimeFailure")


async def test_browser_is_redirected_by_a_private_file(node: Tokens) -> None:
    folder = node.daemon.folder
    browser = folder / "browser"
    script = f'#!/bin/sh\nstat -c %a "${{1#file://}}" >{folder}/mode\n'
    browser.write_text(script + f'cp "${{1#file://}}" {folder}/page\n')
    browser.chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("agentctl"),
        "--socket", str(folder / "agentd.sock"), "ui",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "BROWSER": f"{browser} %s"},
    )  # fmt: skip
    assert process.stdout is not None
    said = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    process.terminate()
    await process.wait()
    assert (folder / "mode").read_text() == "600\n"
    opened = (folder / "page").read_text()
    assert re.search(r"url=http://127\.0\.0\.1:\d+/ui/#token=[\w-]{32,}", opened)
    assert "/ui/ (Ctrl-C ends it)" in said
    assert "token" not in said
