import pytest

from agentd.core.container_options import ContainerOptions, PullPolicy, Tmpfs, Ulimit
from agentd.errors import InvalidRequest
from agentd.rpc.queries import read_log_query
from agentd.rpc.schemas import CreateKernelRequest, read_body
from agentd.services.interfaces import LogStream


def spec(body: bytes):
    return read_body(CreateKernelRequest, body).to_spec("agent-1")


def test_a_request_hashes_as_it_did_in_the_first_release() -> None:
    """A repeated request must meet its kernel across an upgrade."""
    body = b'{"kernel_id": "k", "image": "i:1", "command": ["a"], "slots": {"cpu": 1, "mem": "1g"}}'
    assert spec(body).spec_hash == HASH_OF_0_2


HASH_OF_0_2 = "bc67f81d122d1f48c012ad5dea8d2e08"


def test_options_that_say_nothing_are_as_if_absent() -> None:
    plain = spec(b'{"command": ["a"]}')
    assert plain.container == ContainerOptions()
    spelled = spec(b'{"command": ["a"], "pull_policy": "missing", "tmpfs": [], "ulimits": {}}')
    assert spelled.spec_hash == plain.spec_hash
    other = spec(b'{"command": ["a"], "pull_policy": "always"}')
    assert other.spec_hash != plain.spec_hash


def test_options_are_read() -> None:
    given = spec(
        b'{"pull_policy": "never", "platform": "linux/arm64/v8", "network": "n", "shm_size": "64m",'
        b' "tmpfs": [{"target": "/a"}, {"target": "/b", "size": 4096}], "pids_limit": 9,'
        b' "ulimits": {"core": 0, "nofile": {"soft": 10, "hard": -1}}}'
    ).container
    assert given == ContainerOptions(
        PullPolicy.NEVER, "linux/arm64/v8", "n", (Tmpfs("/a"), Tmpfs("/b", 4096)), 64 << 20, 9,
        {"core": Ulimit(0, 0), "nofile": Ulimit(10, -1)},
    )  # fmt: skip
    one, other = (spec(b'{"shm_size": %s}' % size) for size in (b'"1k"', b"1024"))
    assert one.spec_hash == other.spec_hash


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ("0", 0),
        ("1700000000", 1_700_000_000_000_000_000),
        ("1700000000.5", 1_700_000_000_500_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000_000_000),
        ("2023-11-14T22:13:20.123456789Z", 1_700_000_000_123_456_789),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000_000_000_000),
        ("2023-11-14T23:13:20 01:00", 1_700_000_000_000_000_000),
        ("2023-11-14T22:13:20", 1_700_000_000_000_000_000),
    ],
)
def test_since(since: str, expected: int) -> None:
    assert read_log_query({"since": since}).since_ns == expected


@pytest.mark.parametrize("since", ["later", "-1", "1e9", "2023-13-14T22:13:20Z", "17:00", "", "5Z"])
def test_a_since_that_is_none(since: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_log_query({"since": since})
    assert caught.value.problems[0].where == "since"


def test_streams() -> None:
    assert read_log_query({}).streams == frozenset(LogStream)
    assert read_log_query({"stream": "stderr"}).streams == {LogStream.STDERR}


@pytest.mark.parametrize("member", [b'"slots": {"x\\ud800": 1}', b'"devices": {"x\\ud800": ["a"]}'])
def test_names_that_are_no_text_are_refused(member: bytes) -> None:
    with pytest.raises(InvalidRequest):
        spec(b'{"command": ["a"], %s}' % member)
