"""Ids of containers are validated before they become paths."""

from collections.abc import Callable
from typing import Any

import pytest

from agentd.core.kernel.states import KernelRef
from agentd.errors import RuntimeUnavailable
from agentd.runtimes.docker.container_observer import ContainerObserver
from agentd.runtimes.docker.docker_client import parse_container_id
from agentd.runtimes.docker.docker_errors import DockerResponseLost
from agentd.runtimes.docker.docker_streams import ContainerEvent, _parse_event
from agentd.runtimes.docker.inspection import parse_inspection, validate_inspection

HASH = "0123456789abcdef" * 4
NO_IDS = ["../../images/agentd-test:1", "", "..", HASH[:-1], HASH + "0", HASH.upper(), f"{HASH}\n",
          None, 7, [HASH], {"Id": HASH}]  # fmt: skip


@pytest.mark.parametrize("raw", NO_IDS)
def test_malformed_id_is_a_lost_answer(raw: object) -> None:
    with pytest.raises(DockerResponseLost, match="invalid"):
        parse_container_id(raw)
    assert parse_container_id(HASH) == HASH


def shown(**changes: Any) -> dict[str, Any]:
    """An inspection of a container."""
    labels = {"io.agentd.node": "n", "io.agentd.kernel": "k1", "io.agentd.agent": "a"}
    base = {
        "Id": HASH,
        "Name": "/other",
        "Image": f"sha256:{HASH}",
        "State": {"Status": "running", "Pid": 1},
        "Config": {"Labels": labels},
        "HostConfig": {},
    }
    return {**base, **changes}


class Lying:
    """An engine that answers every path with what it was given."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def fetch_version(self) -> Any:
        return {"ApiVersion": "1.41"}

    async def close(self) -> None: ...

    async def call(self, method: str, path: str, *_: object, **__: object) -> Any:
        self.asked.append(f"{method} {path}")
        return self.answers[path.split("/")[1].split("?", maxsplit=1)[0]]

    async def iterate_list(self, path: str, _: object) -> Any:
        self.asked.append(f"GET {path}")
        for item in self.answers["list"]:
            yield item


def observer(engine: Any) -> ContainerObserver:
    return ContainerObserver(engine, "n")


@pytest.mark.parametrize(
    "item",
    [{**shown(), "Id": raw, "Labels": shown()["Config"]["Labels"]} for raw in NO_IDS] + [{}],
)
async def test_list_with_a_malformed_container_is_refused(item: Any) -> None:
    engine = Lying(list=[item], containers=shown())
    with pytest.raises(RuntimeUnavailable):
        await observer(engine).list_kernels()
    assert engine.asked == ["GET /containers/json"]


async def test_a_malformed_inspection_is_a_lost_answer() -> None:
    for answer in (shown(Id="../x"), {}, [], None):
        with pytest.raises(DockerResponseLost):
            validate_inspection(answer)
        with pytest.raises(RuntimeUnavailable):
            await observer(Lying(containers=answer)).find(KernelRef("k1", HASH))
    assert validate_inspection(shown()) == shown()


EVENT = '{"Action": "%s", "Actor": {"ID": %s, "Attributes": {"name": "x", "io.agentd.kernel": %s}}}'


def test_an_event_has_a_container_and_a_kernel_or_says_nothing() -> None:
    def event(action: str, container: str, kernel: str) -> Any:
        return _parse_event((EVENT % (action, container, kernel)).encode())

    assert event("start", f'"{HASH}"', '"k1"') == ContainerEvent("start", HASH, "x", "k1")
    for kernel in ('"../../PWNED"', '""'):
        assert event("start", f'"{HASH}"', kernel) == ContainerEvent("start", HASH, "x", "")
    with pytest.raises(DockerResponseLost):
        event("start", '"../x"', '"k1"')
    nonsense: list[Callable[[], Any]] = [
        lambda: event("exec_create: sh", f'"{HASH}"', '"k1"'),
        lambda: _parse_event(b'{"Action": ["start"], "Actor": {"ID": "", "Attributes": {}}}'),
        lambda: _parse_event(b'{"Action": "start", "Actor": {"Attributes": 7}}'),
        lambda: _parse_event(b'{"Action": "start", "Actor": null}'),
        lambda: event("start", f'"{HASH}"', "7"),
        lambda: _parse_event(b"["),
    ]
    assert [say() for say in nonsense] == [None] * len(nonsense)


@pytest.mark.parametrize(
    ("listed", "cores"),
    [("0", ("0",)), ("0-2,5", ("0", "1", "2", "5")), ("", None), (None, None)],
)
def test_the_cores_of_a_container_are_read_one_by_one(listed: Any, cores: Any) -> None:
    found = parse_inspection(shown(HostConfig={"CpusetCpus": listed}))
    assert found.cores == cores


def test_ending_hides_the_engines_storage_paths() -> None:
    said = f"mount /var/lib/docker/overlay2/{HASH}/merged/x: {'y' * 5000}"
    found = parse_inspection(shown(State={"Status": "exited", "Error": said}))
    assert found.ending.reason.startswith("mount /x: yyy")
    assert len(found.ending.reason) < 1100
