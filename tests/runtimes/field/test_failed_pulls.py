"""Failed pulls in the words of engines that people have, and whom or what each concerns.

Those of Engine 20.10, 26 and 26 with containerd's image store were recorded against a registry that
fails as it is told; the others come from public reports.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from agentd.errors import (
    AgentdError,
    ImageNotFound,
    ImageUnavailable,
    RuntimeUnavailable,
    StateUnavailable,
    Unavailable,
)
from agentd.runtimes.docker.docker_client import DockerClient
from agentd.runtimes.docker.images import Images
from runtimes.docker.fake_engine import FakeEngine, says
from support.engine import Engine
from support.registry import Registry

HASH = "0123456789abcdef" * 4
BLOB = f"https://r.example/v2/x/blobs/sha256:{HASH}"
RESOLVE = 'failed to resolve reference "r.example/x:1": '
HEAD = f"{RESOLVE}unexpected status from HEAD request to https://r.example/v2/x/manifests/1: "
COPY = "failed to copy: httpReadSeeker: failed open: "
HUB_LIMIT = (
    "toomanyrequests: You have reached your unauthenticated pull rate limit."
    " https://www.docker.com/increase-rate-limit"
)
PODMAN = "initializing source docker://r.example/x:1: "
BOLT = "/data/docker/containerd/daemon/io.containerd.metadata.v1.bolt/meta.db"


def refused(text: str, status: int = 500) -> tuple[int, list[dict[str, object]]]:
    return status, [{"message": text}]


def streamed(text: str) -> tuple[int, list[dict[str, object]]]:
    return 200, [{"status": "Pulling fs layer"}, {"errorDetail": {"message": text}, "error": text}]


def detailed(text: str, code: int | None = None) -> tuple[int, list[dict[str, object]]]:
    """Answer as engines from 29 on, without `error`."""
    detail = {"message": text} if code is None else {"message": text, "code": code}
    return 200, [{"status": "Pulling from x"}, {"errorDetail": detail}]


def only_error(text: str) -> tuple[int, list[dict[str, object]]]:
    """Answer as Podman does."""
    return 200, [{"error": text}]


OF_THE_MOMENT = {
    "rate limit, 20.10": (refused(HUB_LIMIT), 60),
    "rate limit with a time": (
        refused("toomanyrequests: retry-after: 652.38µs, allowed: 44000/minute"), 1,
    ),
    "rate limit with a long time": (refused("toomanyrequests: slow down; Retry-After: 120"), 120),
    "rate limit with an endless time": (
        refused(f"toomanyrequests: retry-after: {'9' * 400}h"), 3600,
    ),
    "rate limit in plain text": (
        refused("error parsing HTTP 429 response body: invalid character 'T' looking for beginning"
                ' of value: "Too Many Requests (HAP429).\\n"'), 60,
    ),
    "rate limit, containerd": (refused(f"{HEAD}429 Too Many Requests"), 60),
    "rate limit of a layer, containerd": (
        detailed(f"{COPY}unexpected status code {BLOB}: 429 Too Many Requests"
                 f" - Server message: {HUB_LIMIT}"), 60,
    ),
    "rate limit of AWS": (refused("toomanyrequests: Rate exceeded"), 60),
    "500": (refused("received unexpected HTTP status: 500 Internal Server Error"), 10),
    "503 of a layer": (streamed("received unexpected HTTP status: 503 Service Unavailable"), 10),
    "502, containerd": (refused(f"{HEAD}502 Bad Gateway"), 10),
    "500 of a layer, containerd": (
        streamed(f"{COPY}unexpected status code {BLOB}: 500 Internal Server Error"), 10,
    ),
    "503, Podman": (only_error(f'{PODMAN}reading manifest 1 in x: StatusCode: 503, "busy"'), 10),
    "a token service that fails": (
        refused(f"{RESOLVE}failed to authorize: failed to fetch oauth token: unexpected status"
                " from GET request to https://auth.docker.io/token?scope=x: 503 Unavailable"), 10,
    ),
    "a closed port": (
        refused('Get "http://127.0.0.1:1/v2/": dial tcp 127.0.0.1:1: connect: connection refused'),
        10,
    ),
    "a closed port, containerd": (
        refused(f'{RESOLVE}failed to do request: Head "https://r.example/v2/x/manifests/1": dial'
                " tcp 127.0.0.1:404: connect: connection refused"), 10,
    ),
    "a closed port, Podman": (
        only_error(f'{PODMAN}pinging container registry r.example: Get "https://r.example/v2/":'
                   " dial tcp 127.0.0.1:1: connect: connection refused"), 10,
    ),
    "an unknown host": (
        refused('Get "https://r.example/v2/": dial tcp: lookup r.example on 10.0.0.2:53: no such'
                " host"), 10,
    ),
    "a name server that fails": (
        refused('Get "https://r.example/v2/": dial tcp: lookup r.example on [::1]:53: read udp'
                " [::1]:404->[::1]:53: read: connection refused"), 10,
    ),
    "a timeout": (
        refused('Get "https://r.example/v2/": net/http: request canceled while waiting for'
                " connection (Client.Timeout exceeded while awaiting headers)"), 10,
    ),
    "TLS that hangs": (refused('Get "https://r.example/v2/": net/http: TLS handshake timeout'), 10),
    "an unknown authority": (
        refused('Get "https://r.example/v2/": tls: failed to verify certificate: x509: certificate'
                " signed by unknown authority"), 10,
    ),
    "a cut layer, 20.10": (streamed("expected HTTP 206 from byte range request"), 10),
    "a cut layer, 26": (streamed("unexpected EOF"), 10),
    "a cut layer, containerd": (
        streamed("failed to read expected number of bytes: unexpected EOF"), 10,
    ),
    "a reset": (detailed("read tcp 10.0.0.3:39404->10.0.0.4:443: read: connection reset by peer"),
                10),
    "a damaged layer": (
        streamed(f"filesystem layer verification failed for digest sha256:{HASH}"), 10,
    ),
    "a file system without attributes": (
        streamed("failed to register layer: lsetxattr security.capability /x: operation not"
                 " supported"), 10,
    ),
    "a store that lost a layer, 29": (
        detailed('failed to unpack image on snapshotter overlayfs: apply layer error for'
                 ' "docker.io/library/x:7": failed to extract layer sha256:1: NotFound: failed to'
                 " get reader from content store: content digest sha256:2: not found"), 10,
    ),
    "a store that lost a layer at a power failure": (
        refused("failed to extract layer sha256:1: failed to get reader from content store: blob"
                " sha256:2 expected at /data/c/io.containerd.content.v1.content/blobs/2: blob"
                " not found: not found", 404), 10,
    ),
    "a rate limit under the name of a refusal": (
        refused("pull access denied for x, repository does not exist or may require 'docker login':"
                " denied: 10.0.0.1 request exceeded pull rate limit", 404), 60,
    ),
    "a rate limit as a page": (
        refused("toomanyrequests: <!DOCTYPE html>\n<html><title>403 and 404</title></html>"), 60,
    ),
    "a token service that hangs up": (
        refused(f"{RESOLVE}failed to authorize: failed to fetch anonymous token: Get"
                ' "https://auth.docker.io/token?scope=repository%3Ax%3Apull": EOF'), 10,
    ),
    "a registry whose own disk is full": (
        refused("error parsing HTTP 500 response body: invalid character 'w' looking for beginning"
                ' of value: "write /r/\\"x\\": no space left on device"'), 10,
    ),
    "a registry that says that its disk is full": (
        refused("unknown: no space left on device"), 10,
    ),
    "a registry that speaks as the engine's disk": (
        refused("unknown: write /data/docker/tmp/GetImageBlob1: no space left on device"), 10,
    ),
    "a registry that speaks on a line of its own": (
        refused("errors:\nunknown: x\nfailed to register layer: no space left on device\n"), 10,
    ),
    "a registry that speaks as a disk, containerd": (
        detailed(f"{COPY}unexpected status code {BLOB}: 500 Internal Server Error"
                 " - Server message: unknown: write /x: input/output error"), 10,
    ),
    "a registry that speaks as a disk, Podman": (
        only_error(f"{PODMAN}reading manifest 1 in r.example/x: unknown: writing blob: write /x:"
                   " no space left on device"), 10,
    ),
    "a file of a layer that is named as a full disk": (
        streamed("failed to register layer: lsetxattr security.capability /x: no space left on"
                 " device: operation not supported"), 10,
    ),
    "words that nobody knows": (refused("the flux capacitor is empty"), 10),
    "no words": (detailed("", 0), 10),
    "a proxy's socket that is not permitted": (
        refused("proxyconnect tcp: dial unix /run/proxy.sock: connect: permission denied"), 10,
    ),
    "an image that is named as a refusal": (
        refused('Get "https://r.example/v2/denied: unauthorized/manifests/404": EOF'), 10,
    ),
}  # fmt: skip

OF_THE_IMAGE = {
    "no such manifest, 20.10": refused("manifest unknown"),
    "no such tag": refused("manifest for r.example/x:1 not found: manifest unknown", 404),
    "no such name": refused("name unknown"),
    "no such name, engine's words": refused("repository r.example/x not found", 404),
    "no such image, containerd": refused(f"{RESOLVE}r.example/x:1: not found", 404),
    "no such image, containerd, in the stream": detailed(f"{RESOLVE}r.example/x:1: not found"),
    "no such image, with a code": detailed("there is none", 404),
    "no such image, Podman": only_error(
        f"{PODMAN}reading manifest 1 in r.example/x: manifest unknown"
    ),
    "404 that is a page": refused(
        "error parsing HTTP 404 response body: invalid character '<' looking for beginning of"
        ' value: "<html>404</html>"'
    ),
    "denied, Podman, with the end of a line": only_error(
        f"{PODMAN}reading manifest 1 in r.example/x: requested access to the resource is denied\n"
    ),
    "404, Podman": only_error(
        f'{PODMAN}reading manifest 1 in r.example/x: StatusCode: 404, "404 page not found"'
    ),
    "denied, without words": refused("denied"),
    "denied, Docker Hub": refused(
        "pull access denied for x, repository does not exist or may require 'docker login': denied:"
        " requested access to the resource is denied", 404,
    ),
    "denied, containerd": refused(f"{HEAD}403 Forbidden"),
    "denied, Podman": only_error(
        f"{PODMAN}reading manifest 1 in r.example/x: denied: requested access to the resource is"
        " denied"
    ),
    "unauthorized": refused("unauthorized"),
    "a wrong password": refused(
        'Get "https://r.example/v2/": unauthorized: incorrect username or password'
    ),
    "no credentials": refused(
        'Head "https://r.example/v2/x/manifests/1": no basic auth credentials'
    ),
    "no credentials, containerd": refused(
        f"{RESOLVE}pull access denied, repository does not exist or may require authorization:"
        " authorization failed: no basic auth credentials"
    ),
    "no name of an image": refused("invalid reference format", 400),
    "capitals": refused(
        "invalid reference format: repository name (Bad) must be lowercase", 400
    ),
    "a short name, Podman": only_error(
        'short-name "x" did not resolve to an alias and no unqualified-search registries are'
        ' defined in "/etc/containers/registries.conf"'
    ),
    "no such platform": streamed(
        "no matching manifest for linux/s390x in the manifest list entries"
    ),
    "no such platform, containerd": streamed("no match for platform in manifest: not found"),
    "no such platform, Podman": only_error(
        "choosing an image from manifest list docker://r.example/x:1: no image found in manifest"
        ' list for architecture "s390x", variant "", OS "linux"'
    ),
    "a manifest of the first schema, 26": refused(
        "[DEPRECATION NOTICE] Docker Image Format v1 and Docker Image manifest version 2, schema 1"
        " support is disabled by default and will be removed in an upcoming release."
    ),
    "a manifest of the first schema": refused(
        "media type application/vnd.docker.distribution.manifest.v1+prettyjws is no longer"
        " supported since containerd v2.1"
    ),
}  # fmt: skip

OF_THE_NODE = {
    "a full disk, 20.10": streamed(
        "write /data/docker/tmp/GetImageBlob3039582: no space left on device"
    ),
    "a full disk while a layer is unpacked": streamed(
        "failed to register layer: Error processing tar file(exit status 1): write /usr/lib/x.so:"
        " no space left on device"
    ),
    "a full disk, containerd": refused(
        f"error creating temporary lease: write {BOLT}: no space left on device: unknown"
    ),
    "a full disk, errorDetail alone": detailed(f"write {BOLT}: no space left on device"),
    "a full disk, Podman": only_error(
        'writing blob: storing blob to file "/var/tmp/container_images_storage2999638705/2": write'
        " /var/tmp/container_images_storage2999638705/2: no space left on device"
    ),
    "a full disk while a file about cgroups is unpacked": streamed(
        "failed to register layer: write /usr/include/linux/cgroupstats.h: no space left on device"
    ),
    "a full disk, of an image below dev": refused(
        "pulling r.example/dev/train: write /data/docker/tmp/GetImageBlob1: no space left on device"
    ),
    "a quota": streamed("write /data/docker/tmp/GetImageBlob1: disk quota exceeded"),
    "a disk that became read-only": streamed(
        "open /data/docker/tmp/GetImageBlob1: read-only file system"
    ),
    "a disk that fails": streamed("write /data/docker/tmp/GetImageBlob1: input/output error"),
}  # fmt: skip


@pytest.fixture
async def fake_engine(folder: Path) -> AsyncIterator[FakeEngine]:
    made = FakeEngine(folder / "engine.sock")
    await made.start()
    yield made
    await made.stop()


async def failure(socket: Path, image: str) -> AgentdError:
    """Pull an image that cannot be pulled, and return why."""
    client = DockerClient(socket)
    try:
        with pytest.raises(AgentdError) as caught:
            await Images(client).pull(image, None, None, lambda _: None)
    finally:
        await client.close()
    return caught.value


async def answered(engine: FakeEngine, answer: tuple[int, list[dict[str, object]]]) -> AgentdError:
    status, lines = answer
    engine.answer = says(status, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    return await failure(engine.path, "r.example/x:1")


@pytest.mark.parametrize(("answer", "retry_after_s"), OF_THE_MOMENT.values(), ids=OF_THE_MOMENT)
async def test_what_passes_is_unavailable(fake_engine, answer, retry_after_s: int) -> None:
    error = await answered(fake_engine, answer)
    assert isinstance(error, ImageUnavailable), repr(error)
    assert error.retry_after_s == retry_after_s
    assert str(error).startswith("image r.example/x:1: ")
    assert "/data" not in str(error)


@pytest.mark.parametrize("answer", OF_THE_IMAGE.values(), ids=OF_THE_IMAGE)
async def test_what_stays_is_not_found(fake_engine, answer) -> None:
    error = await answered(fake_engine, answer)
    assert isinstance(error, ImageNotFound), repr(error)
    assert not str(error).endswith("\n")
    assert "/etc/" not in str(error)


@pytest.mark.parametrize("answer", OF_THE_NODE.values(), ids=OF_THE_NODE)
async def test_full_disk_is_the_node_s_and_shows_no_path(fake_engine, answer) -> None:
    error = await answered(fake_engine, answer)
    assert isinstance(error, StateUnavailable), repr(error)
    assert str(error).startswith("image r.example/x:1: the disk of the node's engine is ")
    assert "/data" not in str(error)
    assert "/var" not in str(error)


async def test_paths_of_other_failures_are_hidden(fake_engine: FakeEngine) -> None:
    text = 'failed to register layer: lstat /data/docker/overlay2/x: open "/data/y": it broke'
    error = await answered(fake_engine, streamed(text))
    assert isinstance(error, ImageUnavailable)
    assert "/data" not in str(error)
    assert str(error).endswith("it broke")
    kept = 'Get "https://r.example/v2/": EOF'
    assert str(await answered(fake_engine, refused(kept))) == f"image r.example/x:1: {kept}"


@pytest.mark.parametrize(
    "line",
    [
        *({"status": "Pulling fs layer"}, 1, "x", None),
        *({"status": "Downloading", "progressDetail": odd} for odd in (5, ["x"], {"total": "x"})),
    ],
)
async def test_cut_or_odd_answer_is_the_engine_s(fake_engine: FakeEngine, line: Any) -> None:
    error = await answered(fake_engine, (200, [line]))
    assert isinstance(error, RuntimeUnavailable)
    assert "was interrupted" in str(error)


def downloading(current: int) -> bytes:
    line = {"status": "Downloading", "id": "a", "progressDetail": {"current": current, "total": 99}}
    return json.dumps(line).encode() + b"\n"


@pytest.mark.parametrize("is_repeated", [False, True], ids=["silent", "repeats its last line"])
async def test_pull_that_stands_still_ends(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, is_repeated: bool
) -> None:
    """An engine with containerd's image store repeats its lines while nothing moves."""
    monkeypatch.setattr("agentd.runtimes.docker.images.STALL_TIMEOUT_S", 1)
    sent: list[int] = []

    async def stand_still(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for current in range(30):  # longer than that, but it moves
            await response.write(downloading(current))
            sent.append(current)
            await asyncio.sleep(0.05)
        while request.transport is not None and not request.transport.is_closing():
            if is_repeated:
                await response.write(downloading(sent[-1]))
            await asyncio.sleep(0.02)
        return response

    fake_engine.answer = stand_still
    error = await failure(fake_engine.path, "r.example/x:1")
    assert isinstance(error, ImageUnavailable)
    assert str(error) == "image r.example/x:1: its pull made no progress for 1 s"
    assert len(sent) == 30


async def test_long_message_is_judged_fast(fake_engine: FakeEngine) -> None:
    async with asyncio.timeout(5):
        for text in ("manifest for " * 10**5, "status " * 10**5, "/" * 10**6, '"' * 10**6):
            assert len(str(await answered(fake_engine, refused(text)))) < 1100


class FailingRegistry(Registry):
    """A registry that answers with the status in an image's name."""

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not (name := request.match_info.get("name", "")).isdecimal():
            return cast("web.StreamResponse", await handler(request))
        code = {"404": "MANIFEST_UNKNOWN", "403": "DENIED"}.get(name, "UNKNOWN")
        return web.json_response({"errors": [{"code": code}]}, status=int(name))


@pytest.fixture
async def failing_registry() -> AsyncIterator[FailingRegistry]:
    made = FailingRegistry()
    await made.start()
    yield made
    await made.stop()


# A cut layer was recorded: an engine repeats it for more than a minute.
REAL: dict[str, tuple[Callable[[int], str], type[AgentdError]]] = {
    "rate limit": (lambda port: f"127.0.0.1:{port}/429:1", ImageUnavailable),
    "500": (lambda port: f"127.0.0.1:{port}/500:1", ImageUnavailable),
    "503": (lambda port: f"127.0.0.1:{port}/503:1", ImageUnavailable),
    "a closed port": (lambda _: "127.0.0.1:1/x:1", ImageUnavailable),
    "an unknown host": (lambda _: "nowhere.invalid/x:1", ImageUnavailable),
    "no such image": (lambda port: f"127.0.0.1:{port}/404:1", ImageNotFound),
    "not allowed": (lambda port: f"127.0.0.1:{port}/403:1", ImageNotFound),
}


@pytest.mark.docker
@pytest.mark.parametrize("engine_name", ["engine", "engine26"])
async def test_real_engine_s_failures_are_attributed(
    request: pytest.FixtureRequest, engine_name: str, failing_registry: FailingRegistry
) -> None:
    engine: Engine = request.getfixturevalue(engine_name)
    for name, (image, meaning) in REAL.items():
        error = await failure(engine.socket, image(failing_registry.port))
        assert type(error) is meaning, f"{name}: {error!r}"
        assert isinstance(error, Unavailable) is (meaning is ImageUnavailable)
