"""Access on a shared node: every role on every route, over real sockets."""

import json
import os
from typing import Any

import aiohttp
import pytest

from end_to_end.test_events import listening, until
from support.daemon import Answer, Daemon, gpus

OWN, FOREIGN = "own-kernel", "secret-kernel"
TEAMS = '[[agents]]\nid = "team-a"\n[[agents]]\nid = "secret-team"\n'
SOCKETS = """
[[rpc.sockets]]
path = "{folder}/a.sock"
role = "agent"
agents = ["team-a"]
[[rpc.sockets]]
path = "{folder}/reader.sock"
role = "read"
[[rpc.sockets]]
path = "{folder}/reader-a.sock"
role = "read"
agents = ["team-a"]
"""
ROLES = ("agentd", "a", "reader", "reader-a")
SCOPED = ("a", "reader-a")
RIGHTS = {
    "get_node": "look", "list_runtimes": "look", "forget_runtime": "node", "list_plugins": "look",
    "reload": "node", "retry_plugin": "node", "stop_plugin": "node",
    "start_plugin": "node", "list_slot_types": "look", "list_devices": "look",
    "drain_device": "node", "undrain_device": "node", "forget_device": "node",
    "clear_device": "node",
    "list_agents": "look", "get_agent_of_agent": "look", "get_agent": "look",
    "create_kernel_of_agent": "kernels", "list_kernels_of_agent": "look", "list_kernels": "look",
    "get_kernel": "look", "stop_kernel": "kernels", "delete_kernel": "kernels",
    "signal_kernel": "kernels",
    "exec_kernel": "output", "list_refusals": "look", "get_stats": "look", "list_stats": "look",
    "get_logs": "output", "get_events": "look", "whoami": "look", "get_openapi": "look",
    "create_claim_of_agent": "kernels", "list_claims": "look", "get_claim": "look",
    "renew_claim": "kernels", "delete_claim": "kernels", "get_edits": "kernels",
    "list_engines": "look", "put_engine": "node",
    "get_metrics": "look", "livez": "look", "readyz": "look",
}  # fmt: skip
"""The right of each operation; a missing one fails."""
MAY = {
    "agentd": {"look", "output", "kernels", "node"},
    "a": {"look", "output", "kernels"},
    "reader": {"look"},
    "reader-a": {"look"},
}


async def call(
    daemon: Daemon, role: str, method: str, path: str, body: Any = None, **headers: str
) -> Answer:
    connector = aiohttp.UnixConnector(str(daemon.folder / f"{role}.sock"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, f"http://agentd{path}", json=body, headers=headers) as response,
    ):
        if response.content_type == "text/event-stream":
            return Answer(response.status, response.headers.copy(), b"")
        return Answer(response.status, response.headers.copy(), await response.read())


@pytest.fixture
async def node(plain: Daemon) -> Daemon:
    """Two teams, each with two GPUs of its own, and for each a kernel on one and a claim."""
    sockets = SOCKETS.format(folder=plain.folder)
    resource = '[resource]\nallocation-mode = "auto-split"\nengine-devices = { test = {} }\n'
    await plain.start(f"{resource}{TEAMS}{gpus(4)}{sockets}")
    for agent, kernel_id in (("team-a", OWN), ("secret-team", FOREIGN)):
        await plain.running(agent, kernel_id=kernel_id, slots={"cuda.device": 1})
        claim = {"claim_id": kernel_id, "holder": {"name": "x"}, "slots": {"mem": "1m"}}
        made = await plain.call("POST", f"/v1/agents/{agent}/claims", claim)
        assert made.status == 201, made.content
    return plain


def filled(path: str, *, own: bool) -> str:
    places = {
        "{agent}": "team-a" if own else "secret-team",
        "{kernel}": OWN if own else FOREIGN,
        "{claim}": OWN if own else FOREIGN,
        "{engine}": "test",
        "{device_name}": "cuda",
        "{id}": "cuda0" if own else "cuda3",
        "{plugin}": "cuda",
        "{runtime}": "process",
    }
    for place, name in places.items():
        path = path.replace(place, name)
    return path


def expected(role: str, right: str, path: str, *, own: bool) -> set[int] | None:
    """The statuses that refuse; None if the call is to be carried out."""
    is_placed = any(place in path for place in ("{agent}", "{kernel}", "{claim}", "{id}"))
    if role in SCOPED and is_placed and not own:
        return {404}
    return None if right in MAY[role] else {403}


@pytest.mark.parametrize("role", ROLES)
async def test_callers_have_exactly_the_rights_of_the_table(node: Daemon, role: str) -> None:
    """Every route of the document, on what is the caller's own and on what is another team's."""
    document = await node.get("/v1/openapi.json")
    operations = [
        (method.upper(), path, operation["operationId"])
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    operations.sort(key=lambda item: item[0] == "DELETE")
    for method, path, name in operations:
        for own in (False, True):
            wanted = expected(role, RIGHTS[name], path, own=own)
            body = {"command": ["true"], "slots": {"cpu": 0}} if "create" in name else None
            answer = await call(node, role, method, filled(path, own=own), body)
            where = (role, method, filled(path, own=own), answer.status, answer.content)
            if wanted is None:
                assert answer.status not in (401, 403, 404), where
            else:
                assert answer.status in wanted, where
                assert answer.json["code"] != "Internal", where
            if role in SCOPED:
                shown = answer.content.decode().replace(filled(path, own=own), "")
                if answer.status == 404:
                    shown = shown.replace(filled("{agent} {kernel}", own=own).split()[0], "")
                    shown = (
                        shown.replace(FOREIGN, "")
                        if "{kernel}" in path or "{claim}" in path
                        else shown
                    )
                assert "secret" not in shown, where


UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


@pytest.mark.parametrize("role", SCOPED)
async def test_foreign_kernel_reads_as_an_unknown_one_on_every_route(
    node: Daemon, role: str
) -> None:
    """Answer, log and refusals: a foreign id leaves nothing that an unknown one does not."""
    document = await node.get("/v1/openapi.json")
    calls = [
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if "{kernel}" in path
    ]
    assert len(calls) >= 6
    for method, path in calls:
        seen = []
        for kernel_id in (FOREIGN, "nothing-kernel"):
            begun = len(node.log)
            headers = UPGRADE if path.endswith("/exec") else {}
            url = path.replace("{kernel}", kernel_id)
            answer = await call(node, role, method, url, None, **headers)
            lines = [json.loads(line) for line in node.log[begun:].splitlines()]
            logged = [
                (line["event"], line["action"], line["outcome"])
                for line in lines
                if line["event"] == "rpc.call"
            ]
            shown = {k: v.replace(kernel_id, "X") for k, v in answer.json.items() if k == "detail"}
            seen.append((answer.status, answer.json["code"], answer.json.keys(), shown, logged))
        assert seen[0] == seen[1], (method, path)
        assert seen[0][:2] == (404, "UnknownKernel"), (method, path)


@pytest.mark.parametrize(
    "body",
    [
        {"env": {"A": ["hunter2"]}},
        {"env": {"hunter2": 1}},
        {"env": {"AGENTD_hunter2": "x"}},
        {"command": ["hunter2", 1]},
        {"command": ["hunter2"]},
        {"labels": {"io.agentd.hunter2": "x"}},
        {"labels": {"hunter2": 1}},
    ],
    ids=str,
)
async def test_refused_create_shows_nothing_private_to_others(
    node: Daemon, body: dict[str, Any]
) -> None:
    async with listening(node, sock="reader.sock") as frames:
        refused = await call(
            node, "a", "POST", "/v1/agents/team-a/kernels", {"command": ["true"], **body}
        )
        assert refused.status == 422
        heard = await until(frames, event="refusal")
    others = [frame for frame in heard if frame["event"] != "kernel"]  # it shows what was sent
    assert "hunter2" not in json.dumps(others)
    for role in ROLES:
        refusals = (await call(node, role, "GET", "/v1/refusals")).json
        assert [row["code"] for row in refusals] == [refused.json["code"]]
        assert "hunter2" not in json.dumps(refusals)
    assert "hunter2" not in node.log


async def test_an_id_that_another_team_has_is_only_taken(node: Daemon) -> None:
    body = {"command": ["true"], "kernel_id": FOREIGN}
    answer = await call(node, "a", "POST", "/v1/agents/team-a/kernels", body)
    assert (answer.status, answer.json["code"]) == (409, "KernelConflict")
    assert answer.json["detail"] == f"duplicate kernel id {FOREIGN}"


async def test_shared_device_hides_holders_of_other_agents(plain: Daemon) -> None:
    await plain.start(TEAMS + gpus(1, "shares") + SOCKETS.format(folder=plain.folder))
    await plain.running("secret-team", kernel_id=FOREIGN, slots={"cuda.shares": "0.75"})
    await plain.running("team-a", kernel_id=OWN, slots={"cuda.shares": "0.25"})
    devices = (await call(plain, "a", "GET", "/v1/devices")).json
    (gpu,) = [device for device in devices if device["device_name"] == "cuda"]
    assert gpu["agents"] == ["team-a"]
    assert sorted(holder["kernel_id"] for holder in gpu["holders"]) == ["other", OWN]
    body = {"command": ["true"], "slots": {"cuda.shares": "0.5"}}
    for query in ("", "?dry_run=true"):
        answer = await call(plain, "a", "POST", f"/v1/agents/team-a/kernels{query}", body)
        assert answer.status == 409
        assert "secret" not in answer.content.decode()


@pytest.mark.parametrize("role", ROLES)
async def test_only_administrators_see_device_files(plain: Daemon, role: str) -> None:
    sockets = SOCKETS.format(folder=plain.folder)
    await plain.start(f'[[agents]]\nid = "team-a"\n{gpus(1)}files = ["/dev/sim/{{id}}"]\n{sockets}')
    devices = {row["id"]: row for row in (await call(plain, role, "GET", "/v1/devices")).json}
    assert devices["cuda0"]["files"] == (["/dev/sim/cuda0"] if role == "agentd" else [])
    assert devices["root"]["files"] == []
    drained = await plain.call("POST", "/v1/devices/cuda/cuda0/drain")
    assert drained.json["files"] == ["/dev/sim/cuda0"]


async def test_answers_do_not_reveal_names_of_other_agents(node: Daemon) -> None:
    """The same request with a name that exists, and with one that does not, reads the same."""
    await node.call("DELETE", f"/v1/kernels/{FOREIGN}?timeout=0")
    await node.running("secret-team", kernel_id="secret-two", slots={"cuda.device": 1})
    asks = [
        ("GET", "/v1/kernels?state={}", None),
        ("GET", "/v1/kernels?limit={}", None),
        ("GET", "/v1/kernels?after={}", None),
        ("GET", "/v1/agents/team-a/kernels?after={}", None),
        ("GET", "/v1/kernels?label=x={}", None),
        ("POST", "/v1/agents/team-a/kernels", {"command": ["true"], "slots": {"{}": "1"}}),
        ("POST", "/v1/agents/team-a/kernels", {"command": ["true"], "devices": {"cuda": ["{}"]}}),
        ("POST", "/v1/agents/team-a/kernels", {"command": ["true"], "{}": 1}),
        ("POST", "/v1/agents/team-a/kernels?dry_run=true", {"command": ["true"], "user": "{}"}),
    ]
    for name in ("secret-team", FOREIGN, "secret-two", "cuda3"):
        nothing = "nothing-" + name
        for method, path, body in asks:
            answers = []
            for guess in (name, nothing):
                filled = json.loads(json.dumps(body).replace("{}", guess))
                answer = await call(node, "a", method, path.replace("{}", guess), filled)
                answers.append((answer.status, answer.content.decode().replace(guess, "X")))
            assert answers[0] == answers[1], (name, path, body)


async def test_an_explanation_shows_the_devices_of_the_team_alone(node: Daemon) -> None:
    body = {"command": ["true"], "slots": {"cuda.device": 1, "cpu": 0}}
    path = "/v1/agents/team-a/kernels?dry_run=true"
    mine = (await call(node, "a", "POST", path, body)).json["explain"]["cuda.device"]
    assert [row["device"] for row in mine] == ["cuda0", "cuda1"]
    all_of_them = (await call(node, "agentd", "POST", path, body)).json["explain"]["cuda.device"]
    assert [row["device"] for row in all_of_them] == ["cuda0", "cuda1", "cuda2", "cuda3"]
    body["slots"]["cuda.device"] = 9
    refused = (await call(node, "a", "POST", path, body)).json
    assert [row["device"] for row in refused["explain"]] == ["cuda0", "cuda1"]


async def test_a_team_hears_of_its_own_kernels_alone(node: Daemon) -> None:
    async with listening(node, sock="a.sock") as frames:
        await node.running("secret-team", kernel_id="secret-2", slots={"cuda.device": 1})
        await node.call("POST", "/v1/devices/cuda/cuda3/drain")
        await node.running("team-a", kernel_id="mine", slots={"cuda.device": 1})
        heard = await until(frames, kernel_id="mine", state="running")
    assert "secret" not in json.dumps(heard)
    assert "cuda3" not in json.dumps(heard)


async def test_a_team_sees_conditions_of_its_own_devices(plain: Daemon) -> None:
    (plain.folder / "health").write_text("")
    cuda = f'{gpus(4)}health-file = "{plain.folder / "health"}"\n'
    resource = '[resource]\nallocation-mode = "auto-split"\n[plugins]\nhealth-interval = 0.1\n'
    await plain.start(resource + TEAMS + cuda + SOCKETS.format(folder=plain.folder))
    async with listening(plain, sock="a.sock") as frames:
        (plain.folder / "health").write_text("cuda3 gone\ncuda0 unhealthy it coughs\n")
        heard = await until(frames, event="condition")
        subjects = [frame["data"].get("about", frame["data"].get("id")) for frame in heard]
        assert subjects == ["cuda0", "device/cuda/cuda0"]
    view = (await call(plain, "a", "GET", "/v1/node")).json
    assert [condition["about"] for condition in view["conditions"]] == ["device/cuda/cuda0"]
    assert view["warnings"] == ["cuda0 is unhealthy: it coughs"]
    metrics = (await call(plain, "a", "GET", "/metrics")).content.decode()
    assert metrics.count('agentd_condition{about="device/cuda/cuda0"} 1.0') == 1
    assert "cuda3" not in metrics
    assert len((await call(plain, "reader", "GET", "/v1/node")).json["conditions"]) == 2


async def test_a_team_is_told_that_what_it_shares_changed_and_no_more(plain: Daemon) -> None:
    await plain.start(TEAMS + gpus(2) + SOCKETS.format(folder=plain.folder))
    async with listening(plain, sock="a.sock") as frames:
        await plain.running("secret-team", kernel_id="secret-2", slots={"cuda.device": 1})
        heard = await until(frames, event="free")
        devices = (await call(plain, "a", "GET", "/v1/devices")).json
        held = [d["holders"] for d in devices if d["id"] == "cuda0"]
        assert held == [[{"kernel_id": "other", "amount": "1", "amounts": {"cuda.device": "1"}}]]
        await plain.call("POST", "/v1/kernels/secret-2/stop", {"timeout": 0})
        heard += await until(frames, event="free")
        await plain.call("DELETE", "/v1/kernels/secret-2")
        await plain.running("team-a", kernel_id="mine", slots={"cuda.device": 1})
        heard += await until(frames, kernel_id="mine", state="running")
    assert "secret" not in json.dumps(heard)
    assert [f["data"] for f in heard if f["event"] == "free"] == [{}, {}]
    async with listening(plain) as frames:
        await plain.running("secret-team", kernel_id="secret-3", slots={"cuda.device": 1})
        heard = await until(frames, kernel_id="secret-3", state="running")
    assert "free" not in [frame["event"] for frame in heard], "who sees the kernel needs no more"


async def test_kernel_and_log_name_its_creator(node: Daemon) -> None:
    body = {
        "command": ["sleep", "1000"],
        "kernel_id": "mine",
        "labels": {"job": "7"},
        "env": {"SECRET": "hidden", "OTHER": "x"},
        "slots": {"cpu": 0},
    }
    made = await call(node, "a", "POST", "/v1/agents/team-a/kernels", body)
    assert made.json["created_by"] == "a"
    await node.restart()
    kernel = await node.get("/v1/kernels/mine")
    assert (kernel["created_by"], kernel["command"], kernel["labels"], kernel["image"]) == (
        "a",
        ["sleep", "1000"],
        {"job": "7"},
        None,
    )
    assert (kernel["env"], kernel["mounts"]) == (["SECRET", "OTHER"], [])
    assert "hidden" not in json.dumps(kernel)
    await call(node, "reader", "DELETE", "/v1/kernels/mine")
    calls = [line for line in node.log.splitlines() if "rpc.call" in line]
    assert any('"create_kernel"' in line and '"caller": "a"' in line for line in calls)
    assert any('"Forbidden"' in line and '"caller": "reader"' in line for line in calls)


async def test_whoami(node: Daemon) -> None:
    shown = {role: (await call(node, role, "GET", "/v1/whoami")).json for role in ROLES}
    uid = os.getuid()
    assert shown["agentd"] == {"name": "agentd", "role": "admin", "agents": None, "uid": uid}
    assert shown["a"] == {"name": "a", "role": "agent", "agents": ["team-a"], "uid": uid}
    assert shown["reader"]["agents"] is None
