"""The status page in a real Chromium: everything on it, as things happen."""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from end_to_end.browser import Visit, shown, visit
from support.daemon import Daemon

pytestmark = pytest.mark.asyncio(loop_scope="session")
CONFIG = """
[[agents]]
id = "research"
[[agents]]
id = "inference"
[plugins.cuda]
plugin = "sim"
count = 4
mode = "shares"
health-file = "{health}"
[plugins.broken]
plugin = "sim"
count = 1
fault = "raise"
fault-at = "open"
"""
SLEEPER = ["sleep", "100000"]
HOSTILE = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"


@pytest.fixture
async def node(plain: Daemon) -> Daemon:
    health = plain.folder / "health"
    health.write_text("cuda3 unhealthy it coughs\n")
    await plain.start(CONFIG.replace("{health}", str(health)))
    return plain


@pytest_asyncio.fixture(loop_scope="session")
async def page(node: Daemon, browser: Browser) -> AsyncIterator[Visit]:
    async with shown(node) as address, visit(browser, address) as visited:
        yield visited


async def test_page_answers_operators_questions(node: Daemon, page: Visit) -> None:
    await node.running(
        "research", kernel_id="train", command=SLEEPER, slots={"cpu": 1, "cuda.shares": "0.5"}
    )
    await node.running("inference", kernel_id="serve", command=SLEEPER, slots={"cuda.shares": 1})
    assert (await node.create("research", kernel_id="big", slots={"cuda.shares": 9})).status == 409
    assert node.node in await page.text("#node")
    await page.until("#refusals", "InsufficientResource")
    assert "requested 9, 1.5 free" in await page.text("#refusals")
    assert "kernel big, asked by agentd" in await page.text("#refusals")
    await page.until("#tiles", "of 4 cuda free")
    warnings = await page.text("#warnings")
    assert "plugin broken is pending: open" in warnings
    assert "device cuda cuda3" in warnings
    assert "cuda3 is unhealthy: it coughs" in warnings
    assert "cuda.shares" in await page.text("#agents")
    await page.until("#rows", "train")
    rows = await page.text("#rows")
    assert "serve" in rows
    assert "1 cpu" in rows
    assert "2 of 2" in await page.text("#shown")
    await page.page.wait_for_selector('.cell[aria-label*="train has 0.5"]')
    half = page.cell("cuda cuda0")
    label = await half.get_attribute("aria-label")
    assert "0.5 of 1 used" in label
    assert "train has 0.5" in label
    parts = half.locator(".fill span")
    assert await parts.count() == 1
    assert await parts.first.evaluate("part => part.style.blockSize") == "50%"
    colour = await parts.first.get_attribute("data-colour")
    assert colour == await page.page.get_attribute("#legend .swatch", "data-colour")
    assert await page.cell("cuda cuda3").get_attribute("data-state") == "unhealthy"
    await page.page.reload()  # reads the figures at once
    await page.page.wait_for_function(
        "() => document.querySelector('.kernel .c-memory span')?.innerText.includes('B')"
    )


async def test_page_shows_a_new_kernel_and_its_devices(node: Daemon, page: Visit) -> None:
    await page.until("#shown", "0 of 0")
    await node.running("research", kernel_id="new", command=SLEEPER, slots={"cuda.shares": 1})
    await page.until("#rows", "new", 3000)
    await page.page.wait_for_selector('.cell[aria-label*="new has 1"]')
    await page.page.hover(".kernel:has-text('new')")
    lit = page.page.locator(".dimmed .cell.lit")
    assert (await lit.first.get_attribute("aria-label")).startswith("cuda cuda0")
    await page.cell("cuda cuda0").hover()
    assert await page.page.locator(".kernel.lit").count() == 1
    assert "new has 1" in await page.text("#tip")


async def test_a_kernel_is_looked_into_stopped_and_removed(node: Daemon, page: Visit) -> None:
    command = ["sh", "-c", "n=0; while :; do echo step $((n=n+1)); sleep 0.2; done"]
    await node.running("research", kernel_id="loud", command=command, labels={"owner": "ann"})
    await page.page.click("text=loud")
    await page.until("#details .output", "step 2")
    await page.until("#details .output", "step 4")
    assert "owner=ann" in await page.text("#details .facts")
    await page.page.click("#details button:has-text('Stop')")
    assert (await node.get("/v1/kernels/loud"))["state"] == "running"
    await page.page.click("#details button:has-text('Really stop?')")
    await page.until("#details .facts", "terminated")
    assert await page.page.locator("#details button:has-text('Stop')").count() == 0
    await page.page.click("#details button:has-text('Delete')")
    await page.page.click("#details button:has-text('Really delete?')")
    await page.until("#details .facts", "removed")
    assert (await node.call("GET", "/v1/kernels/loud")).status == 404


async def test_lost_connection_is_shown_and_mended(node: Daemon, page: Visit) -> None:
    command = ["sh", "-c", "n=0; while :; do echo step $((n=n+1)); sleep 0.2; done"]
    await node.running("research", kernel_id="loud", command=command)
    await page.page.click("text=loud")
    await page.until("#details .output", "step 2")
    assert await page.text("#live") == "live"
    await node.stop()
    await page.until("#live", "no connection")
    await page.until("#details .output", "trying again")
    assert "step 2" in await page.text("#details .output")
    await node.start()
    await page.page.wait_for_function(
        "() => /^step 1\\n(step \\d+\\n)*$/.test(document.querySelector('.output').textContent)"
    )
    seen = (await page.text("#details .output")).split()[-1]
    await page.until("#details .output", f"step {int(seen) + 2}")
    await page.until("#live", "live")
    await node.running("research", kernel_id="later", command=SLEEPER)
    await page.until("#rows", "later")
    page.errors.clear()  # the browser reports what could not be fetched


BARS = r"printf '10%%\r 55%%\r'; printf '100%%\r\n\033[1;31mred\033[0m \033]0;title\007'; "
BARS += r"printf '(\033[Kerased) xx\b\by\b\033'; printf '[32mz\n12%%\r34%%\r'; sleep 1000"


async def test_progress_bars_show_their_last_frame(node: Daemon, page: Visit) -> None:
    await node.running("research", kernel_id="bars", command=["sh", "-c", BARS])
    await page.page.click("text=bars")
    await page.until("#details .output", "34%")
    shown = await page.page.locator("#details .output").evaluate("place => place.textContent")
    assert shown == "100%\nred (erased) zx\n34%"


async def test_output_goes_on_where_a_broken_answer_ended(node: Daemon, page: Visit) -> None:
    count = "n=0; while :; do echo step $((n=n+1)); sleep 0.1; done"
    await node.running("research", kernel_id="loud", command=["sh", "-c", count])
    await page.page.click("text=loud")
    for last in (3, 20, 40):
        await page.until("#details .output", f"step {last}\n")
        await node.stop()
        await page.until("#details .output", "trying again")
        await node.start()
    await page.until("#details .output", "step 60\n")
    shown = await page.page.locator("#details .output").evaluate("place => place.textContent")
    steps = shown.split("\n")[:60]
    assert steps == [f"step {number}" for number in range(1, 61)]
    assert sum("/logs?" in url and "tail=" in url for url in page.asked) == 1
    page.errors.clear()  # the browser reports what could not be fetched


async def test_output_of_another_kernel_with_the_id_is_not_appended(
    node: Daemon, page: Visit
) -> None:
    prints = ["sh", "-c", "echo one two three; exec sleep 1000"]
    await node.running("research", kernel_id="loud", command=prints)
    await page.page.click("text=loud")
    await page.until("#details .output", "three")
    await page.page.route("**/logs?**", lambda route: route.abort())
    await node.stop()
    await page.until("#details .output", "trying again")
    await node.start()
    assert (await node.call("DELETE", "/v1/kernels/loud?timeout=0")).status == 204
    await node.running("research", kernel_id="loud", command=prints)
    await page.page.unroute("**/logs?**")
    await page.until("#details .output", "another one has its id")
    shown = await page.page.locator("#details .output").evaluate("place => place.textContent")
    assert shown.count("three") == 1
    page.errors.clear()  # the browser reports what could not be fetched


@pytest.mark.parametrize(
    "size", [5_000_000, pytest.param(50_000_000, marks=pytest.mark.soak)]
)  # far more than the page keeps
@pytest.mark.parametrize(
    "line", ["y\\n", "y", "\\r", "\\033["], ids=["lines", "one", "bar", "escape"]
)
async def test_page_stays_responsive_with_endless_output(
    node: Daemon, page: Visit, size: int, line: str
) -> None:
    flood = f"yes | tr -d '\\n' | head -c {size} | sed 's/y/{line}/g'"
    command = ["sh", "-c", f"{flood}; echo over; sleep 1000"]
    await node.running("research", kernel_id="loud", command=command)
    await page.page.click("text=loud")
    await page.until("#details .output", "over", 60_000)
    assert len(await page.text("#details .output")) < 1 << 19


async def test_devices_are_drained_with_the_keyboard_alone(node: Daemon, page: Visit) -> None:
    await page.cell("cuda cuda0").focus()
    await page.page.keyboard.press("ArrowRight")
    await page.page.keyboard.press("Enter")
    await page.until("#details", "cuda cuda1")
    await page.page.locator("#details button:has-text('Drain')").focus()
    await page.page.keyboard.press("Enter")
    await page.until("#details", "drained")
    assert (await node.device("cuda1"))["state"] == "drained"
    await page.page.wait_for_selector("#details button:has-text('Give it out again')")
    await page.page.locator("#details button:has-text('Give it out again')").focus()
    await page.page.keyboard.press("Enter")
    await page.page.wait_for_selector("#details button:has-text('Drain')")
    await page.page.keyboard.press("Escape")
    assert not await page.page.locator("#details").is_visible()
    assert (await node.device("cuda1"))["state"] == "ok"


async def test_names_are_text_and_never_markup(node: Daemon, page: Visit) -> None:
    labels = {"owner": HOSTILE, "line": "a\u2028b\u2029c"}
    command = ["sh", "-c", f"printf '%s\\n' '{HOSTILE.replace(chr(39), '')}'; sleep 1000", HOSTILE]
    await node.running("research", kernel_id="evil", command=command, labels=labels)
    await node.create("research", kernel_id="evil2", slots={f"{HOSTILE}": 1})
    await page.page.click("text=evil")
    await page.until("#details .output", "<img")
    await page.until("#details .facts", HOSTILE)
    assert await page.page.locator("img, #main script, #details script").count() == 0
    assert "pwned" not in await page.page.title()


async def test_page_sends_requests_to_its_own_origin_only(node: Daemon, page: Visit) -> None:
    await node.running("research", kernel_id="k", command=SLEEPER)
    await page.until("#rows", "k")
    ours = urlsplit(page.page.url).netloc
    assert {urlsplit(url).netloc for url in page.asked} == {ours}
    assert "token" not in page.page.url
    assert await page.page.context.cookies() == []
    await page.page.reload()
    await page.until("#rows", "k")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1440, "light"),
        (390, "dark"),
        pytest.param(1440, "dark", marks=pytest.mark.soak),
        pytest.param(390, "light", marks=pytest.mark.soak),
    ],
)
async def test_axe_finds_no_serious_fault(
    node: Daemon, browser: Browser, scheme: str, width: int
) -> None:
    await node.running("research", kernel_id="train", command=SLEEPER, slots={"cuda.shares": 1})
    await node.create("research", kernel_id="big", slots={"cuda.shares": 9})
    look = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
    async with (
        shown(node) as address,
        visit(browser, address, **look) as page,
    ):
        await page.until("#rows", "train")
        assert await page.faults() == []
        await page.page.click("text=train")
        await page.until("#details .facts", "research")
        assert await page.faults() == []
        is_wide = "() => document.documentElement.scrollWidth > innerWidth"
        assert not await page.page.evaluate(is_wide)


async def test_kernels_are_found_and_sorted(node: Daemon, page: Visit) -> None:
    for number in (1, 2, 10):
        await node.running("research", kernel_id=f"k-{number}", command=SLEEPER)
    await page.until("#shown", "3 of 3")
    await page.page.click("#head button:has-text('Kernel')")

    async def names() -> list[str]:
        found = []
        for row in await page.page.locator(".kernel:not([hidden])").all():
            place = await row.get_attribute("aria-rowindex")
            found.append((place, await row.locator("button").inner_text()))
        return [name for _, name in sorted(found)]

    assert await names() == ["k-1", "k-2", "k-10"]
    await page.page.click("#head button:has-text('Kernel')")
    assert await names() == ["k-10", "k-2", "k-1"]
    await page.page.fill("#find", "k-10")
    await page.until("#shown", "1 of 3")
    await node.call("POST", "/v1/kernels/k-10/stop", {"timeout": 0})
    await page.until("#shown", "0 of 3")
    await page.page.select_option("#states", "ended")
    await page.until("#rows", "k-10")
