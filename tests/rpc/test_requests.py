import json
from collections.abc import Callable
from typing import Any

import pytest
from multidict import MultiDict

from agentd.core.kernel.options import ULIMITS, Ulimit
from agentd.errors import MAX_PROBLEMS, InvalidRequest
from agentd.http.bodies import read_body
from agentd.http.problem_responses import problem_members
from agentd.http.queries import read_query
from agentd.rpc.queries import LogsQuery
from agentd.rpc.requests import (
    MAX_CONDITIONS,
    MAX_SENTENCE,
    CreateKernelRequest,
    EngineRequest,
)
from agentd.runtimes.docker.container_config import (
    ContainerOptions,
    PullPolicy,
    Tmpfs,
    container_options,
)
from agentd.services.protocols import LogQuery, LogStream


def spec(body: bytes):
    return read_body(CreateKernelRequest, body).to_spec("agent-1")


def test_a_request_hashes_as_it_did_in_the_first_release() -> None:
    """A repeated request must meet its kernel across an upgrade."""
    body = b'{"kernel_id": "k", "image": "i:1", "command": ["a"], "slots": {"cpu": 1, "mem": "1g"}}'
    assert spec(body).spec_hash == HASH_OF_0_2
    assert spec(body[:-1] + b', "keep_claim": false}').spec_hash == HASH_OF_0_2


HASH_OF_0_2 = "bc67f81d122d1f48c012ad5dea8d2e08"


@pytest.mark.parametrize(("member", "keeps"), [(b"", None), (b"false", False), (b"true", True)])
def test_request_keeps_its_claim_as_it_says(member: bytes, keeps: bool | None) -> None:
    named = b', "keep_claim": ' + member if member else b""
    body = b'{"kernel_id": "k", "command": ["a"], "claim": "c1"%s}' % named
    assert spec(body).keeps_claim is keeps
    assert (spec(body).spec_hash == HASH_WITH_CLAIM) is (keeps is None)


HASH_WITH_CLAIM = "87b9deea9e87612539e6dcf985061da0"
"""As the versions before have it, in which `keep_claim` was false by default."""


@pytest.mark.parametrize(
    "name", ["a\nb", "a\rb", "a\x1b[2Jb", "a\x9bb", "a\u202eb", "a\u2028b", ""]
)
def test_name_of_a_holder_is_one_printable_line(name: str) -> None:
    from agentd.rpc.requests import CreateClaimRequest

    with pytest.raises(InvalidRequest) as refused:
        read_body(CreateClaimRequest, json.dumps({"holder": {"name": name}}))
    assert [problem.where for problem in refused.value.problems] == ["holder.name"]
    assert read_body(CreateClaimRequest, '{"holder": {"name": "job 17, \u00e9"}}').holder.name


def test_options_that_say_nothing_are_as_if_absent() -> None:
    plain = spec(b'{"command": ["a"]}')
    assert plain.options == {}
    assert container_options(plain) == ContainerOptions()
    spelled = spec(b'{"command": ["a"], "pull_policy": "missing", "tmpfs": [], "ulimits": {}}')
    assert spelled.spec_hash == plain.spec_hash
    other = spec(b'{"command": ["a"], "pull_policy": "always"}')
    assert other.spec_hash != plain.spec_hash


def test_options_are_read() -> None:
    given = spec(
        b'{"pull_policy": "never", "platform": "linux/arm64/v8", "network": "n", "shm_size": "64m",'
        b' "tmpfs": [{"target": "/a"}, {"target": "/b", "size": 4096}], "pids_limit": 9,'
        b' "ulimits": {"core": 0, "nofile": {"soft": 10, "hard": -1}}}'
    )
    assert container_options(given) == ContainerOptions(
        pull_policy=PullPolicy.NEVER,
        platform="linux/arm64/v8",
        network="n",
        tmpfs=(Tmpfs("/a"), Tmpfs("/b", 4096)),
        shm_size=64 << 20,
        pids_limit=9,
        ulimits={"core": Ulimit(0, 0), "nofile": Ulimit(10, -1)},
    )
    one, other = (spec(b'{"shm_size": %s}' % size) for size in (b'"1k"', b"1024"))
    assert one.spec_hash == other.spec_hash


def log_query(**parameters: str) -> LogQuery:
    return read_query(LogsQuery, MultiDict(parameters)).to_log_query()


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
def test_since_is_parsed(since: str, expected: int) -> None:
    assert log_query(since=since).since_ns == expected


@pytest.mark.parametrize("since", ["later", "-1", "1e9", "2023-13-14T22:13:20Z", "17:00", "", "5Z"])
def test_invalid_since_is_refused(since: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        log_query(since=since)
    assert caught.value.problems[0].where == "since"


def test_stream_is_parsed() -> None:
    assert log_query().streams == log_query(stream="both").streams == frozenset(LogStream)
    assert log_query(stream="stderr").streams == {LogStream.STDERR}


def test_tail_is_parsed() -> None:
    assert log_query().tail is log_query(tail="all").tail is None
    assert (log_query(tail="0").tail, log_query(tail="7").tail) == (0, 7)


@pytest.mark.parametrize(("text", "position"), [("0", 0), ("7", 7), ("9" * 30, 10**30 - 1)])
def test_from_is_parsed(text: str, position: int) -> None:
    assert log_query(**{"from": text}).from_position == position


@pytest.mark.parametrize(
    "query",
    [{"from": "-1"}, {"from": "1.5"}, {"from": "x"}, {"from": ""}, {"from": "1", "tail": "0"},
     {"from": "1", "since": "0"}],
)  # fmt: skip
def test_invalid_from_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        log_query(**query)
    assert caught.value.problems[0].where == "from"


@pytest.mark.parametrize("member", [b'"slots": {"x\\ud800": 1}', b'"devices": {"x\\ud800": ["a"]}'])
def test_names_must_be_text(member: bytes) -> None:
    with pytest.raises(InvalidRequest):
        spec(b'{"command": ["a"], %s}' % member)


MANY = 70_000
MOST_ANSWER = 128 * 1024


def text(content: object) -> bytes:
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "hostile",
    [
        {f"unknown{n}": 1 for n in range(MANY)},
        {f"{n}" + "comand" * 600: 1 for n in range(200)},
        {"\U0001f600" * 3000 + str(n): 1 for n in range(MAX_PROBLEMS)},
        {"command": [1] * 5 * MANY},
        {"command": ["a"] * 5 * MANY},
        {"env": {f"={n}": "" for n in range(MANY)}},
        {"env": {f"={n}": 1 for n in range(1024)}, "labels": {str(n): 1 for n in range(999)}},
        {"slots": {f"s{n}": 0 for n in range(MANY)}},
        {"devices": {f"d{n}": [1] * 4096 for n in range(60)}},
        {"labels": {f"{n}": "" for n in range(MANY)}},
        {"ulimits": {f"{n}": 1 for n in range(MANY)}},
        {"mounts": [1] * 3 * MANY, "ports": [{}] * 256, "tmpfs": [[]] * 256},
        {"mounts": [{str(n): 1 for n in range(15)}] * 256},
        {"mounts": [{}] * 4 * MANY},
        {"command": [1.5] * 3 * MANY},
        b"{%s}" % b",".join(b'"a%d":1,"a%d":1' % (n, n) for n in range(MANY // 2)),
        b"{%s}" % b",".join(b'"a%d":1,"a%d":1' % (n, n) for n in range(2000)),
    ],
    ids=lambda hostile: str(hostile)[:12],
)
def test_refusal_of_a_hostile_body_is_short(hostile: bytes | dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_body(CreateKernelRequest, hostile if isinstance(hostile, bytes) else text(hostile))
    refused = raised.value
    assert 0 < len(refused.problems) <= MAX_PROBLEMS
    answer = problem_members(refused.code, str(refused), refused.facts())
    assert len(json.dumps(answer)) < MOST_ANSWER


@pytest.mark.parametrize(
    ("member", "value", "most"),
    [
        ("command", lambda n: ["a"] * n, 4096),
        ("env", lambda n: {f"a{i}": "" for i in range(n)}, 1024),
        ("labels", lambda n: {f"a{i}": "" for i in range(n)}, 1024),
        ("slots", lambda n: {f"a{i}": 0 for i in range(n)}, 256),
        ("devices", lambda n: {f"a{i}": ["x"] for i in range(n)}, 256),
        ("devices", lambda n: {"a": ["x"] * n}, 4096),
        ("mounts", lambda n: [{"source": "/a", "target": "/b"}] * n, 256),
        ("ports", lambda n: [{"container": 1}] * n, 256),
        ("tmpfs", lambda n: [{"target": "/a"}] * n, 256),
        ("env", lambda n: {"a": "x" * n}, 32768),
        ("env", lambda n: {"a" * n: ""}, 256),
        ("labels", lambda n: {"a" * n: ""}, 256),
        ("labels", lambda n: {"a": "x" * (n - 1)}, 8192),
        ("labels", lambda n: {"a": "", "\u20ac": "\u20ac" * 2000 + "x" * (n - 6004)}, 8192),
        ("slots", lambda n: {"a" * n: 0}, 256),
        ("command", lambda n: ["a" * n], 4095),
        ("command", lambda n: ["a", "a" * n], 32768),
        ("command", lambda n: ["a", *["\u20ac" * 1000] * 43, "x" * (n - 129_001)], 131_072),
        ("image", lambda n: "a" * n, 4095),
        ("working_dir", lambda n: "/" + "a" * (n - 1), 4095),
        ("user", lambda n: "a" * n, 256),
        ("network", lambda n: "a" * n, 256),
    ],
)
def test_member_takes_its_bound_and_no_more(
    member: str, value: Callable[[int], Any], most: int
) -> None:
    read_body(CreateKernelRequest, text({member: value(most)}))
    with pytest.raises(InvalidRequest) as refused:
        read_body(CreateKernelRequest, text({member: value(most + 1)}))
    assert refused.value.problems[0].where.split(".")[0] == member


HIDDEN = "hunter2"


@pytest.mark.parametrize(
    "body",
    [
        {"env": {"A": [HIDDEN]}},
        {"env": {"A": {HIDDEN: HIDDEN}}},
        {"env": [HIDDEN]},
        {"env": HIDDEN},
        {"env": {HIDDEN + "=": "x"}},
        {"env": {"A": HIDDEN + "\0"}},
        {"command": HIDDEN},
        {"command": [[HIDDEN]]},
        {"command": ["a", HIDDEN + "\0"]},
        {"command": {HIDDEN: 1}},
        {"labels": {HIDDEN: 1}},
        {"labels": {"a": [HIDDEN]}},
        {"labels": HIDDEN},
        {"labels": {"a": HIDDEN * 10_000}},
    ],
    ids=str,
)
def test_problem_quotes_nothing_of_private_members(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_body(CreateKernelRequest, text(body))
    assert HIDDEN not in refused.value.public_text()
    assert HIDDEN not in " ".join(problem.why for problem in refused.value.problems)


def test_body_takes_the_bounds_of_all_its_members_at_once() -> None:
    names = [f"n{number}" for number in range(1024)]
    body = {
        "env": dict.fromkeys(names, ""),
        "labels": dict.fromkeys(names, ""),
        "slots": dict.fromkeys(names[:256], 0.5),
        "devices": {name: ["a"] for name in names[:256]},
        "mounts": [{"source": "/a", "target": "/b", "read_only": True}] * 256,
        "ports": [{"container": 1, "host": 1, "protocol": "tcp"}] * 256,
        "tmpfs": [{"target": "/a", "size": "1g"}] * 256,
        "ulimits": {name: {"soft": 1, "hard": 1} for name in ULIMITS},
    }
    read_body(CreateKernelRequest, text(body))


def test_member_given_twice_is_named_to_its_caller_alone() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_body(CreateKernelRequest, b'{"env": {"hunter2": "a", "hunter2": "b"}}')
    assert str(refused.value) == "hunter2: given more than once"
    assert refused.value.public_text() == "given more than once"


def test_problem_quotes_a_plain_value_of_other_members() -> None:
    with pytest.raises(InvalidRequest, match=r"pull_policy: .*, not 'sometimes'"):
        read_body(CreateKernelRequest, b'{"pull_policy": "sometimes"}')


@pytest.mark.parametrize(
    ("member", "value", "why"),
    [
        ("kernel_id", "no name", "expected a name: at most 63 of A-Z a-z 0-9 _ . -"),
        ("working_dir", "relative", "expected a path that begins with /, not 'relative'"),
        ("platform", "Linux", "expected OS/ARCHITECTURE, such as linux/amd64, not 'Linux'"),
        ("image", "a\0b", "expected text without NUL"),
        ("command", "sleep", "expected a list"),
        ("tmpfs", [{"target": "x"}], "expected a path that begins with /, without commas"),
        ("mounts", [{"source": "/x"}], "is missing"),
        ("ports", [{"container": "80"}], "expected a whole number, not '80'"),
        ("env", {"A=B": "x"}, "expected the name of a variable, without ="),
        ("labels", [], "expected an object"),
    ],
)
def test_invalid_member_has_a_readable_expectation(member: str, value: object, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_body(CreateKernelRequest, json.dumps({member: value}))
    (problem,) = caught.value.problems
    assert problem.where.startswith(member)
    assert problem.why.startswith(why)


@pytest.mark.parametrize(
    "conditions",
    [
        [{"reason": "r"}] * (MAX_CONDITIONS + 1),
        [{"reason": "r" * (MAX_SENTENCE + 1)}],
        [{"reason": "r", "remedy": "r" * (MAX_SENTENCE + 1)}],
        [{"reason": ""}],
        [{"reason": "nul \0"}],
        [{"remedy": "r"}],
        [{"reason": "r", "about": "host"}],
    ],
)
def test_conditions_of_an_engine_are_bounded(conditions: list[dict[str, str]]) -> None:
    assert read_body(EngineRequest, b'{"ready": true}').conditions is None
    with pytest.raises(InvalidRequest):
        read_body(EngineRequest, json.dumps({"ready": True, "conditions": conditions}))
