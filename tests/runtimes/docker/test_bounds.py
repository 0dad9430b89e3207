"""Every answer of an engine is bounded, and says nothing of where the engine keeps things."""

import asyncio
import gzip
import json
import tracemalloc
from typing import Any

import pytest
from aiohttp import web

from agentd.errors import ImageUnavailable, RuntimeUnavailable
from agentd.runtimes.docker import docker_client as module
from agentd.runtimes.docker.docker_client import DockerClient
from agentd.runtimes.docker.docker_errors import DockerError, DockerResponseLost, clean_message
from agentd.runtimes.docker.images import Images
from runtimes.docker.fake_engine import FakeEngine, says

HASH = "0123456789abcdef" * 4
LABELS = {f"label-{n}": "x" * 60 for n in range(20)}
LISTED = {"Id": HASH, "Names": ["/agentd-0123456789-k1"], "Labels": LABELS, "State": "running"}


@pytest.fixture
def engine(fake_engine: FakeEngine) -> FakeEngine:
    return fake_engine


def pieces(*parts: bytes):
    """Answer piece by piece."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    return answer


async def listed(client: DockerClient) -> list[Any]:
    return [item async for item in client.iterate_list("/containers/json", {})]


async def test_an_endless_answer_takes_no_more_than_its_bound(engine, client, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSE", 1 << 20)
    engine.answer = pieces(*[b"[" * (1 << 16)] * 800)  # 50 MiB
    tracemalloc.start()
    try:
        for asked in (client.call("GET", "/x"), listed(client)):
            with pytest.raises(DockerResponseLost):
                await asked
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


async def test_a_small_answer_that_unpacks_to_a_large_one_stays_small(engine, client) -> None:
    async def packed(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        body = gzip.compress(b"[" + b" " * (1 << 20) + b"]")
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    engine.answer = packed
    with pytest.raises(DockerResponseLost, match="JSON"):
        await client.call("GET", "/x")


async def test_a_list_is_read_an_object_at_a_time(engine, client) -> None:
    raw = json.dumps([LISTED] * 5, indent=1).encode()
    engine.answer = pieces(*(raw[at : at + 7] for at in range(0, len(raw), 7)))
    assert await listed(client) == [LISTED] * 5
    for empty in (b"[]", b" [ ] \n"):
        engine.answer = says(200, empty.strip())
        assert await listed(client) == []


async def test_a_list_of_a_thousand_containers_is_read(engine, client) -> None:
    """Each with all the labels that a request may have, in the record a second time."""
    longest = {**LISTED, "Labels": {"user": "x" * 65536, "io.agentd.record": "y" * 65536}}
    raw = json.dumps(longest).encode()
    engine.answer = pieces(b"[", raw, *[b",", raw] * 999, b"]")
    count = 0
    tracemalloc.start()
    try:
        async for item in client.iterate_list("/containers/json", {}):
            assert len(item["Labels"]["user"]) == 65536
            count += 1
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert count == 1000


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[",
        b'{"Id": "x"}',
        b"null",
        b"[1, 2]",
        b'[{"Id": 1}, {"Id": ',
        b'[{"Id": 1}',
        b"<html>",
        b'["' + b"x" * 1000 + b'"]',
    ],
)
async def test_malformed_or_cut_list_is_lost(engine, client, raw: bytes) -> None:
    engine.answer = says(200, raw)
    with pytest.raises(DockerResponseLost):
        await listed(client)


@pytest.mark.parametrize(("bound", "value"), [("MAX_RESPONSE", 100), ("MAX_LIST", 10_000)])
async def test_a_list_beyond_a_bound_is_lost(engine, client, monkeypatch, bound, value) -> None:
    monkeypatch.setattr(module, bound, value)
    raw = json.dumps([LISTED] * 100).encode()
    engine.answer = pieces(*(raw[at : at + 1000] for at in range(0, len(raw), 1000)))
    with pytest.raises(DockerResponseLost, match="too large"):
        await listed(client)


@pytest.mark.parametrize("version", [b"null", b"[]", b"{}", b"<html>"])
async def test_malformed_version_is_a_lost_answer(engine, client, version) -> None:
    engine.version = version
    with pytest.raises(DockerResponseLost, match=r"version|JSON"):
        await client.call("GET", "/info")
    assert engine.asked == ["GET /version"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"lstat /var/lib/docker/overlay2/{HASH}/merged/a/b: no", "lstat /a/b: no"),
        (f"mkdir /mnt/x y/overlay2/{HASH}-init: no", "mkdir /mnt/x : no"),
        (f'open "/run/containerd/task/moby/{HASH}/log.json": no', 'open "/log.json": no'),
        (f"lowerdir=/var/lib/docker/overlay2/l/{'A' * 26}:/d/overlay2/l/{'B' * 26}", "lowerdir=:"),
        ("stat /usr/bin/nosuch: no such file", "stat /usr/bin/nosuch: no such file"),
        ("write /d/network/files/local-kv.db: no", "write : no"),
        ("open /d/docker/image/overlay2/repositories.json: no", "open : no"),
        ("write /d/c/daemon/io.containerd.metadata.v1.bolt/meta.db: no", "write : no"),
        ("mount source: /d/c/tmpmounts/containerd-mount12: no", "mount source: : no"),
        (f"no such container: {HASH}", f"no such container: {HASH}"),
    ],
)
def test_where_an_engine_keeps_its_layers_is_not_shown(said: str, shown: str) -> None:
    assert clean_message(said) == shown
    assert DockerError(500, said).message == DockerError(500, said).detail == str(shown)


@pytest.mark.parametrize("part", ["/a", "/", f"/{HASH[1:]}"])
def test_a_message_of_many_paths_is_cut_before_it_is_read(part: str) -> None:
    assert len(clean_message(part * (1 << 20))) < 1100


@pytest.mark.parametrize(
    ("lines", "error", "told"),
    [
        ([b'{"status": "' + b"x" * (1 << 20)], RuntimeUnavailable, "interrupted"),
        ([b'{"error": "no: ' + b"x" * 3000 + b'"}'], ImageUnavailable, "no: xxx"),
    ],
)
async def test_pull_progress_is_bounded(engine, client, lines, error, told) -> None:
    engine.answer = pieces(*(line + b"\n" for line in lines))
    with pytest.raises(error, match=told) as caught:
        await Images(client).pull("image:1", None, None, lambda _: None)
    assert len(str(caught.value)) < 1200
