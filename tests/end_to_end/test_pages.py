"""Lists of more entries than one page has, and the bounds that keep every page small."""

import asyncio

import click
import pytest
from playwright.async_api import Browser, Route

from agentd.cli.agentctl.completion import claims, kernels
from agentd.client import AsyncClient, Client
from agentd.client.paths import next_query
from agentd.core.labels import MAX_AGENT_BYTES, MAX_LABELS_BYTES
from agentd.http.queries import MAX_PAGE, MAX_PAGE_BYTES
from agentd_slurm.node_client import NodeClient
from end_to_end.browser import context, shown, visit
from support.daemon import AGENTS, BASE, Daemon
from support.fork_server import run
from support.saved_records import save_claims, save_kernels

COUNT = MAX_PAGE + 1
KERNELS = [f"k{number:04}" for number in range(COUNT)]
CLAIMS = [f"c{number:04}" for number in range(COUNT)]


@pytest.fixture
async def full(plain: Daemon) -> Daemon:
    """A node with 1,001 ended kernels and 1,001 claims."""
    save_kernels(plain, COUNT)
    save_claims(plain, COUNT)
    plain.configure(AGENTS, BASE.replace("[rpc]", "keep-ended = 2000\n[rpc]"))
    await plain.start()
    return plain


async def test_each_client_reads_all_pages(full: Daemon) -> None:
    socket = str(full.folder / "agentd.sock")
    for path in ("/v1/kernels", "/v1/agents/agent-1/kernels", "/v1/claims"):
        page = await full.call("GET", path)
        assert len(page.json) == MAX_PAGE
        last = await full.call("GET", f"{path}?{next_query(page.headers['Link'])}")
        assert (len(last.json), last.headers.get("Link")) == (1, None)

    async with AsyncClient(socket) as node:
        assert [kernel["kernel_id"] for kernel in await node.kernels()] == KERNELS
        assert [claim["claim_id"] for claim in await node.claims()] == CLAIMS
        assert len(await node.kernels("agent-1", limit=MAX_PAGE)) == MAX_PAGE
        assert len(await node.claims(limit=2, after="c0001")) == 2

    def ask() -> None:
        client, engine = Client(socket), NodeClient(socket)
        assert [kernel["kernel_id"] for kernel in client.kernels("agent-1")] == KERNELS
        assert [claim["claim_id"] for claim in client.claims(labels={})] == CLAIMS
        assert len(client.kernels(limit=MAX_PAGE)) == len(client.claims(limit=MAX_PAGE)) == MAX_PAGE
        assert [kernel["kernel_id"] for kernel in engine.kernels()] == KERNELS
        assert [claim["claim_id"] for claim in engine.claims()] == CLAIMS
        context = click.Context(click.Command("agentctl"))
        context.params = {"socket_path": socket}
        for complete, names in ((kernels, KERNELS), (claims, CLAIMS)):
            found = complete(context, click.Option(["--x"]), "")
            assert [item.value for item in found] == names

    await asyncio.to_thread(ask)
    for words, names in ((("ls", "-q"), KERNELS), (("claims", "-o", "json"), CLAIMS)):
        done = await asyncio.to_thread(run, "agentctl", "--socket", socket, *words)
        assert done.returncode == 0, done.stderr
        assert all(name in done.stdout for name in names)
    doctor = await asyncio.to_thread(run, "agentctl", "--socket", socket, "doctor")
    assert CLAIMS[-1] in doctor.stdout


async def test_page_ends_after_its_bytes(plain: Daemon) -> None:
    labels = {"a": "x" * (MAX_LABELS_BYTES - 1)}
    save_claims(plain, MAX_PAGE_BYTES // MAX_LABELS_BYTES + 9, labels)
    await plain.start()
    page = await plain.call("GET", "/v1/claims?limit=1000")
    assert MAX_PAGE_BYTES <= len(page.content) < MAX_PAGE_BYTES + 2 * MAX_LABELS_BYTES
    rest = await plain.get(f"/v1/claims?{next_query(page.headers['Link'])}")
    names = [claim["claim_id"] for claim in (*page.json, *rest)]
    assert names == [f"c{number:04}" for number in range(len(names))]
    assert len(names) == MAX_PAGE_BYTES // MAX_LABELS_BYTES + 9


async def test_labels_of_an_agent_have_a_bound_over_a_restart(plain: Daemon) -> None:
    save_claims(plain, MAX_AGENT_BYTES // MAX_LABELS_BYTES, {"a": "x" * (MAX_LABELS_BYTES - 1)})
    await plain.start()

    async def refusals(agent: str, labels: dict[str, str]) -> list[tuple[int, str]]:
        body = {"holder": {"name": "n"}, "slots": {"mem": 1}, "labels": labels}
        claim = await plain.call("POST", f"/v1/agents/{agent}/claims", body)
        kernel = await plain.create(agent, command=["true"], slots={"cpu": 0}, labels=labels)
        answers = (claim, kernel)
        assert all(str(MAX_AGENT_BYTES) in a.json["detail"] for a in answers if a.status != 201)
        return [(answer.status, answer.json.get("code", "")) for answer in answers]

    made = [(201, "")] * 2
    assert await refusals("agent-1", {"a": "b"}) == [
        (429, "TooManyClaims"),
        (409, "InsufficientResource"),
    ]
    words = ("create", "agent-1", "--label", "a=b", "--", "true")
    socket = str(plain.folder / "agentd.sock")
    done = await asyncio.to_thread(run, "agentctl", "--socket", socket, *words)
    assert done.stderr.startswith("agentctl: InsufficientResource: insufficient labels"), done
    assert await refusals("agent-1", {}) == made
    assert await refusals("agent-2", {"a": "b"}) == made
    assert (await plain.call("DELETE", "/v1/claims/c0000")).status == 204
    assert await refusals("agent-1", {"a": "b"}) == made


@pytest.mark.asyncio(loop_scope="session")
async def test_status_page_reads_all_pages(full: Daemon, browser: Browser) -> None:
    async with shown(full) as address, visit(browser, address) as page:
        await page.until("#shown", f"of {COUNT}")
        pages = [url.partition("?")[0] for url in page.asked if "after=" in url]
        assert sorted(url.rpartition("/")[2] for url in pages) == ["claims", "kernels"]


@pytest.mark.asyncio(loop_scope="session")
async def test_status_page_ends_a_list_without_an_end(plain: Daemon, browser: Browser) -> None:
    async def same(route: Route) -> None:
        link = '</v1/kernels?after=7~k1>; rel="next"'
        await route.fulfill(json=[], headers={"Link": link})

    await plain.start()
    async with shown(plain) as address, context(browser) as visited:
        await visited.page.route("**/v1/kernels*", same)
        await visited.page.goto(address)
        await visited.until("#live", "no connection")
