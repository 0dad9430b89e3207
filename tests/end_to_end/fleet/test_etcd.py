"""The client of etcd, against real members: writes by revision, one reading, watches, faults."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest

from agentd_fleet.store.etcd_client import Change, EtcdClient
from agentd_fleet.store.etcd_transport import (
    EtcdCredentials,
    EtcdRefused,
    EtcdUnavailable,
    LeaseGone,
    RevisionsCompacted,
    WatchStream,
)
from end_to_end.fleet.etcd_server import EtcdServers
from end_to_end.fleet.network import Proxy

PROGRESS = "--experimental-watch-progress-notify-interval=100ms"


@pytest.fixture
async def three(tmp_path: Path, running: list[EtcdServers]) -> EtcdServers:
    running.append(EtcdServers(tmp_path, 3))
    await running[0].start()
    return running[0]


@pytest.fixture
async def etcd(servers: EtcdServers) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(EtcdCredentials(servers.endpoints)) as made:
        yield made


@pytest.fixture
async def in_mortal(mortal: EtcdServers) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(EtcdCredentials(mortal.endpoints)) as made:
        yield made


@pytest.fixture
async def proxy(servers: EtcdServers) -> AsyncIterator[Proxy]:
    made = Proxy(servers.endpoints[0])
    await made.start()
    yield made
    await made.stop()


async def told(
    etcd: EtcdClient, prefix: str, after: int, count: int, silence_s: float | None = None
):
    """The first changes of a watch, and how far they reach."""
    changes: list[Change] = []
    async with (
        asyncio.timeout(20),
        aclosing(etcd.watch(prefix, after=after, silence_s=silence_s)) as watch,
    ):
        async for some, reached in watch:
            changes += some
            if len(changes) >= count:
                return changes, reached
    raise AssertionError("the watch ended")


async def test_put_if_writes_only_at_the_expected_revision(etcd: EtcdClient) -> None:
    first = await etcd.put_if("routes/k1", b"a", expected=0)
    assert first is not None
    assert await etcd.put_if("routes/k1", b"b", expected=0) is None
    second = await etcd.put_if("routes/k1", b"c", expected=first)
    assert await etcd.put_if("routes/k1", b"d", expected=first) is None
    found = await etcd.get("routes/k1")
    assert found is not None
    assert (found.value, found.mod_revision, found.create_revision) == (b"c", second, first)
    assert not await etcd.delete_if("routes/k1", expected=first)
    assert await etcd.delete_if("routes/k1", expected=found.mod_revision)
    assert await etcd.get("routes/k1") is None
    assert not await etcd.delete_if("routes/k1", expected=found.mod_revision)


async def test_a_key_may_be_empty_or_any_bytes_and_is_deleted_once(etcd: EtcdClient) -> None:
    for value in (b"", bytes(range(256))):
        revision = await etcd.put("nodes/ü", value)
        found = await etcd.get("nodes/ü")
        assert found is not None
        assert (found.key, found.value, found.mod_revision) == ("nodes/ü", value, revision)
        assert revision == await etcd.revision()
    assert await etcd.delete("nodes/ü")
    assert not await etcd.delete("nodes/ü")


async def test_all_keys_are_read_at_one_revision_while_others_write(etcd: EtcdClient) -> None:
    for number in range(25):
        await etcd.put(f"nodes/{number:02}", b"before")
    await etcd.put("nodez", b"not below it")
    before = await etcd.revision()
    pages = []
    async for page, _ in etcd.pages("nodes/", page=10):
        pages.append(page)
        await etcd.put("nodes/24", b"after")
        await etcd.put(f"nodes/new-{len(pages)}", b"after")
        await etcd.delete(f"nodes/{10 * len(pages):02}")
    assert [len(page) for page in pages] == [10, 10, 5]
    items = [item for page in pages for item in page]
    assert [item.key for item in items] == [f"nodes/{number:02}" for number in range(25)]
    assert {item.value for item in items} == {b"before"}
    now, revision = await etcd.range("nodes/", page=7)
    assert (len(now), revision) == (26, await etcd.revision())
    assert [page async for page in etcd.pages("nodes/", page=100, revision=before)] == [
        (items, before)
    ]
    assert await etcd.range("none/") == ([], revision)


async def test_watch_yields_all_changes_in_order(etcd: EtcdClient) -> None:
    after = await etcd.revision()
    large = [bytes([number]) * 700_000 for number in range(8)]
    for number, value in enumerate(large):
        await etcd.put(f"nodes/{number}", value)
        await etcd.put(f"free/{number}", b"not below it")
    await etcd.delete("nodes/3")
    changes, reached = await told(etcd, "nodes/", after, 9)
    assert [change.value for change in changes] == [*large, None]
    assert reached == changes[-1].mod_revision == await etcd.revision()
    again, _ = await told(etcd, "nodes/", changes[4].mod_revision, 4)
    assert again == changes[5:]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
async def test_messages_are_the_same_wherever_their_stream_is_cut(size: int) -> None:
    sent = b'{"result":{"created":true}}\n{"result":{"header":{"revision":"7"}}}\n'
    sent += b'{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader"}}'
    parts = iter([sent[at : at + size] for at in range(0, len(sent), size)])

    async def readany() -> bytes:
        return next(parts, b"")

    response = SimpleNamespace(content=SimpleNamespace(readany=readany), status=200)
    stream = WatchStream("http://etcd", response)  # type: ignore[arg-type]
    assert await stream.next() == {"created": True}
    assert await stream.next() == {"header": {"revision": "7"}}
    with pytest.raises(EtcdUnavailable, match="no leader"):
        await stream.next()


async def test_revisions_that_the_store_gave_up_are_told_as_compacted(
    mortal: EtcdServers, in_mortal: EtcdClient
) -> None:
    first = await in_mortal.put("nodes/a", b"1")
    await in_mortal.put("nodes/a", b"2")
    pages = in_mortal.pages("nodes/", page=1)
    await in_mortal.put("nodes/b", b"3")
    assert len((await anext(pages))[0]) == 1
    last = await in_mortal.put("nodes/c", b"4")
    await mortal.compact(last)
    with pytest.raises(RevisionsCompacted, match=f"revisions before {last}"):
        await told(in_mortal, "nodes/", first, 1)
    with pytest.raises(RevisionsCompacted):
        await anext(pages)
    assert await told(in_mortal, "nodes/", last - 1, 1) == ([Change("nodes/c", b"4", last)], last)


async def test_watch_reports_a_store_behind_as_compacted(in_mortal: EtcdClient) -> None:
    with pytest.raises(RevisionsCompacted, match="the store is at revision 1"):
        await told(in_mortal, "nodes/", 1000, 1, silence_s=0.05)


async def test_a_lease_that_ends_deletes_its_keys_and_the_watch_tells(etcd: EtcdClient) -> None:
    lease = await etcd.grant(1)
    written = await etcd.put_if("nodes/a", b"1", expected=0, lease=lease)
    assert written is not None
    found = await etcd.get("nodes/a")
    assert found is not None
    assert found.lease == lease
    assert await etcd.keep_alive(lease) >= 1
    changes, _ = await told(etcd, "nodes/", written, 1)
    assert changes == [Change("nodes/a", None, written + 1)]
    assert await etcd.keep_alive(lease) == 0
    with pytest.raises(LeaseGone):
        await etcd.put("nodes/a", b"2", lease=lease)
    with pytest.raises(LeaseGone):
        await etcd.put_if("nodes/a", b"2", expected=0, lease=lease)


async def test_a_quiet_watch_lives_on_and_says_how_far_it_has_come(
    tmp_path: Path, running: list[EtcdServers]
) -> None:
    running.append(EtcdServers(tmp_path, options=[PROGRESS]))
    await running[0].start()
    async with EtcdClient(EtcdCredentials(running[0].endpoints)) as etcd, asyncio.timeout(20):
        await etcd.put("free/a", b"another prefix")
        watch = etcd.watch("nodes/", after=1, silence_s=0.02)
        async with aclosing(watch):
            assert await anext(watch) == ([], 2)
            await etcd.put("nodes/a", b"1")
            while not (heard := await anext(watch))[0]:
                assert heard[1] == 2
            assert heard == ([Change("nodes/a", b"1", 3)], 3)


async def test_a_watch_ends_where_its_member_lost_the_others(three: EtcdServers) -> None:
    async with EtcdClient(EtcdCredentials(three.endpoints[:1])) as etcd, asyncio.timeout(30):
        watch = etcd.watch("nodes/", after=0)
        await etcd.put("nodes/a", b"1")
        assert (await anext(watch))[0]
        await three.kill(1)
        await three.kill(2)
        with pytest.raises(EtcdUnavailable, match="no leader"):
            await anext(watch)
        with pytest.raises(EtcdUnavailable, match="no leader"):
            await etcd.put("nodes/a", b"2")


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "hanging"])
async def test_a_watch_ends_with_its_member(mortal: EtcdServers, is_killed: bool) -> None:
    async with (
        EtcdClient(EtcdCredentials(mortal.endpoints), timeout_s=0.3) as etcd,
        asyncio.timeout(20),
    ):
        watch = etcd.watch("nodes/", after=0, silence_s=0.3)
        await etcd.put("nodes/a", b"1")
        assert (await anext(watch))[0]
        if is_killed:
            await mortal.kill(0)
        else:
            mortal.pause(0)
        with pytest.raises(EtcdUnavailable):
            await anext(watch)


async def test_write_with_a_lost_answer_is_recognized(
    servers: EtcdServers, etcd: EtcdClient, proxy: Proxy
) -> None:
    async with EtcdClient(EtcdCredentials((proxy.endpoint, *servers.endpoints))) as lossy:

        def lost() -> EtcdClient:
            lossy._transport._preferred = 0
            proxy.loses = b"POST /v3/kv"
            return lossy

        lease = await etcd.grant(60)
        first = await lost().put_if("routes/k", b"mine", expected=0, lease=lease)
        assert first == await etcd.revision()
        assert await lost().put_if("routes/k", b"other", expected=0, lease=lease) is None
        assert await lost().put_if("routes/k", b"mine", expected=0) is None
        second = await lost().put_if("routes/k", b"next", expected=first)
        assert second == await etcd.revision() == first + 1
        assert not await lost().delete_if("routes/k", expected=first)
        assert await lost().delete_if("routes/k", expected=second)
        await etcd.put("routes/k", b"the same")
        assert await lost().put_if("routes/k", b"the same", expected=0)
        assert await lost().delete("routes/k")
        assert proxy.swallowed == 8


async def test_a_lost_answer_of_the_only_endpoint_leaves_it_open(
    etcd: EtcdClient, proxy: Proxy
) -> None:
    proxy.loses = b"POST /v3/kv/txn"
    async with EtcdClient(EtcdCredentials((proxy.endpoint,))) as lossy:
        with pytest.raises(EtcdUnavailable):
            await lossy.put_if("routes/k", b"mine", expected=0)
        assert await lossy.get("routes/k") is not None


async def test_a_key_that_another_wrote_is_not_taken_for_a_lost_write(
    mortal: EtcdServers, in_mortal: EtcdClient
) -> None:
    """Where nothing can have been sent, the same value is another's."""
    await mortal.kill(0)
    unreached = mortal.endpoints[0]
    with pytest.raises(EtcdUnavailable, match="Cannot connect"):
        await in_mortal.put_if("routes/k", b"same", expected=0)
    await mortal.restart(0)
    await in_mortal.put("routes/k", b"same")
    async with EtcdClient(EtcdCredentials(("http://127.0.0.1:1", unreached))) as other:
        assert await other.put_if("routes/k", b"same", expected=0) is None


async def filled(etcd: EtcdClient) -> None:
    for _ in range(100):
        await etcd.put("nodes/a", b"x" * 500_000)


async def test_a_store_without_space_says_so_and_still_deletes(
    tmp_path: Path, running: list[EtcdServers]
) -> None:
    running.append(EtcdServers(tmp_path, quota_bytes=2**22))
    await running[0].start()
    async with EtcdClient(EtcdCredentials(running[0].endpoints)) as etcd:
        with pytest.raises(EtcdUnavailable, match="database space exceeded"):
            await filled(etcd)
        with pytest.raises(EtcdUnavailable, match="database space exceeded"):
            await etcd.put_if("nodes/b", b"1", expected=0)
        assert await etcd.get("nodes/a") is not None
        assert await etcd.delete("nodes/a")


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("size", [1_600_000, 4_000_000])
async def test_a_value_that_is_too_large_is_refused(etcd: EtcdClient, size: int) -> None:
    with pytest.raises(EtcdRefused, match=r"larger than|too large"):
        await etcd.put("nodes/a", b"x" * size)


async def test_unavailable_store_is_reported_within_the_deadline(three: EtcdServers) -> None:
    async with EtcdClient(EtcdCredentials(three.endpoints), timeout_s=0.6) as etcd:
        for number in range(3):
            three.pause(number)
        for call in (etcd.get("nodes/a"), etcd.put_if("a", b"", expected=0), etcd.grant(5)):
            began = monotonic()
            with pytest.raises(EtcdUnavailable, match="no answer in"):
                await call
            assert monotonic() - began < 1.5
        for number in range(3):
            await three.kill(number)
        with pytest.raises(EtcdUnavailable, match="Cannot connect"):
            await told(etcd, "nodes/", 0, 1)


async def test_client_refuses_a_server_that_is_not_etcd(proxy: Proxy) -> None:
    async with EtcdClient(EtcdCredentials((f"{proxy.endpoint}/elsewhere",))) as etcd:
        with pytest.raises(EtcdRefused, match="HTTP 404"):
            await etcd.get("nodes/a")
