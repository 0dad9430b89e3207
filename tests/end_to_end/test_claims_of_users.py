"""Claims of several callers: what each may name, see and take over."""

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from end_to_end.test_access import call
from support.daemon import AGENTS, TEAM_SOCKETS, Answer, Daemon, gpus
from support.waiting import until

ONE = {"cuda.device": 1}
USER = 4711
SCRIPT = """
import http.client, json, os, socket, sys
path, method, target, body, user = sys.argv[1:]
os.setuid(int(user))
connection = http.client.HTTPConnection("agentd")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(path)
content = body.replace("SELF", str(os.getpid())).replace("PARENT", str(os.getppid()))
connection.request(method, target, content, {"Content-Type": "application/json"})
answer = connection.getresponse()
print(answer.status, json.loads(answer.read() or "{}").get("code", ""))
"""


@pytest.fixture
async def node(plain: Daemon) -> Daemon:
    """agentd with a socket of each of two teams."""
    await plain.start(AGENTS + gpus(4) + TEAM_SOCKETS.format(folder=plain.folder))
    plain.folder.chmod(0o755)
    (plain.folder / "a.sock").chmod(0o666)
    return plain


async def claim(node: Daemon, role: str, claim_id: str, agent="agent-1", **body: Any) -> Answer:
    content = {"claim_id": claim_id, "holder": {"name": "x"}, "slots": ONE, **body}
    return await call(node, role, "POST", f"/v1/agents/{agent}/claims", content)


def as_user(node: Daemon, method: str, path: str, body: str = "{}", user: int = USER) -> str:
    """Call as another user on the socket of the first team."""
    words = [sys.executable, "-c", SCRIPT, str(node.folder / "a.sock"), method, path, body]
    words.append(str(user))
    return subprocess.run(words, capture_output=True, check=True, text=True).stdout.strip()


async def test_only_admins_name_cgroups_owners_and_observed_claims(node: Daemon) -> None:
    for body in (
        {"holder": {"cgroup": "/x"}},
        {"owner_uid": USER},
        {"observed": True},
    ):
        answer = await claim(node, "a", "c1", **body)
        assert (answer.status, answer.json["code"]) == (403, "Forbidden")
        assert answer.json["roles"] == ["admin"]


async def test_only_admins_choose_ids_of_engines(node: Daemon) -> None:
    for prefix in ("slurm", "k8s"):
        kernel = {"kernel_id": f"{prefix}-7", "command": ["true"]}
        refused = [
            await claim(node, "a", f"{prefix}-7"),
            await call(node, "a", "POST", "/v1/agents/agent-1/kernels", kernel),
            await call(node, "a", "POST", "/v1/agents/agent-1/kernels?dry_run=1", kernel),
        ]
        assert [answer.json["code"] for answer in refused] == ["Forbidden"] * 3
        assert f"begin with {prefix}-" in refused[0].json["detail"]
        assert (await claim(node, "agentd", f"{prefix}-7")).status == 201


async def test_only_admins_overcommit(node: Daemon) -> None:
    body = {"kernel_id": "k1", "command": ["true"], "overcommit": True}
    for path in ("/v1/agents/agent-1/kernels", "/v1/agents/agent-1/kernels?dry_run=1"):
        answer = await call(node, "a", "POST", path, body)
        assert (answer.status, answer.json["code"]) == (403, "Forbidden")
        assert answer.json["roles"] == ["admin"]


async def test_only_admins_end_a_claim_that_cannot_be_read(node: Daemon) -> None:
    assert (await claim(node, "a", "c1")).status == 201
    await node.stop()
    record = node.folder / "state/claims/c1.json"
    text = record.read_text()
    record.unlink()
    record.write_text(text.replace("cuda0", "cuda1"))
    await node.start()
    await until(lambda: call(node, "a", "GET", "/v1/devices"), lambda answer: len(answer.json) > 5)
    devices = (await call(node, "a", "GET", "/v1/devices")).json
    assert {h["claim_id"] for d in devices for h in d["holders"]} == {"other"}
    assert (await call(node, "a", "GET", "/v1/claims")).json == []
    for method in ("GET", "DELETE"):
        assert (await call(node, "a", method, "/v1/claims/c1")).status == 404
    assert (await call(node, "agentd", "GET", "/v1/claims/c1")).json["state"] == "unreadable"
    assert (await call(node, "agentd", "DELETE", "/v1/claims/c1")).status == 204


async def test_claims_of_others_cannot_be_seen_or_used(node: Daemon) -> None:
    assert (await claim(node, "b", "secret", "agent-2")).status == 201
    for method, path in (
        ("GET", "/v1/claims/secret"),
        ("POST", "/v1/claims/secret/renew"),
        ("DELETE", "/v1/claims/secret"),
    ):
        hidden = await call(node, "a", method, path)
        absent = await call(node, "a", method, path.replace("secret", "nothing"))
        assert hidden.status == absent.status == 404
        assert hidden.json["detail"].replace("secret", "nothing") == absent.json["detail"]
    assert (await call(node, "a", "GET", "/v1/claims")).json == []
    taken = await claim(node, "a", "secret")
    assert (taken.status, taken.json["code"]) == (409, "ClaimConflict")
    devices = (await call(node, "a", "GET", "/v1/devices")).json
    holders = [holder for device in devices for holder in device["holders"]]
    assert [holder["claim_id"] for holder in holders] == ["other"]
    body = {"command": ["true"], "claim": "secret"}
    refused = await call(node, "a", "POST", "/v1/agents/agent-1/kernels", body)
    assert (refused.status, refused.json["code"]) == (404, "UnknownClaim")


async def test_gateway_names_no_process(node: Daemon) -> None:
    named = '{"name": "x", "role": "agent", "agents": ["agent-1"]}'
    body = {"claim_id": "c1", "holder": {"pid": os.getpid()}, "slots": ONE}
    path = "/v1/agents/agent-1/claims"
    answer = await call(node, "agentd", "POST", path, body, **{"Agentd-Caller": named})
    assert (answer.status, answer.json["code"]) == (422, "InvalidRequest")


@pytest.mark.needs("root")
async def test_users_name_their_own_processes_alone(node: Daemon) -> None:
    path = "/v1/agents/agent-1/claims"

    def claimed(pid: str, more: str = "") -> str:
        body = f'{{"holder": {{"pid": {pid}{more}}}, "slots": {{"cuda.device": 1}}}}'
        return as_user(node, "POST", path, body)

    assert claimed("SELF") == "201"
    assert claimed("PARENT") == "422 InvalidRequest"
    assert claimed("1") == "422 InvalidRequest"
    start = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
    assert claimed("1", f', "start_time": {start}') == "422 InvalidRequest"


@pytest.mark.needs("root")
async def test_owned_claim_is_for_its_user_and_admins(node: Daemon) -> None:
    for claim_id in ("mine", "other"):
        owner = USER if claim_id == "mine" else USER + 1
        made = await claim(node, "agentd", claim_id, owner_uid=owner, holder={"ttl": 600})
        assert made.status == 201
    assert as_user(node, "POST", "/v1/claims/mine/renew") == "200"
    assert as_user(node, "POST", "/v1/claims/other/renew") == "404 UnknownClaim"
    assert as_user(node, "DELETE", "/v1/claims/other") == "404 UnknownClaim"
    body = '{"command": ["true"], "claim": "other"}'
    kernels = "/v1/agents/agent-1/kernels"
    assert as_user(node, "POST", kernels, body) == "404 UnknownClaim"
    assert as_user(node, "POST", kernels, body.replace("other", "mine")) == "201"
    assert (await call(node, "a", "DELETE", "/v1/claims/other")).status == 404
    assert (await call(node, "agentd", "DELETE", "/v1/claims/other")).status == 204


@pytest.mark.needs("root")
async def test_kernel_of_an_owned_claim_is_its_user_s(node: Daemon) -> None:
    for owner in (USER, USER + 1):
        made = await claim(node, "agentd", f"c{owner}", owner_uid=owner, holder={"ttl": 600})
        assert made.status == 201
        body = {"command": ["sleep", "1000"], "keep_claim": True}
        body |= {"claim": f"c{owner}", "kernel_id": f"k{owner}"}
        path = "/v1/agents/agent-1/kernels"
        assert (await call(node, "agentd", "POST", path, body)).status == 201
    mine, other = f"/v1/kernels/k{USER}", f"/v1/kernels/k{USER + 1}"
    for method, call_of in (("GET", "/logs"), ("POST", "/stop"), ("DELETE", "?timeout=0")):
        assert as_user(node, method, f"{other}{call_of}") == "404 UnknownKernel"
    assert as_user(node, "GET", other) == "200"
    assert (await node.get(other))["state"] == "running"
    assert as_user(node, "DELETE", f"{mine}?timeout=0") == "204"
    assert (await call(node, "agentd", "DELETE", f"{other}?timeout=0")).status == 204


AGENTCTL = Path(sys.executable).parent / "agentctl"
SHOW = "id -u; id -ru; id -G; pwd; echo $HOME $USER $LOGNAME $SHELL $XDG_DATA_HOME; exec sleep 1000"


def claim_for(node: Daemon, user: str, folder: Path) -> subprocess.Popen[str]:
    words = [AGENTCTL, "--socket", node.folder / "agentd.sock", "claim", "agent-1", "--id=c1"]
    words += [f"--user={user}", "-s", "cuda.device=1", "--", "sh", "-c", SHOW]
    env = {**os.environ, "XDG_DATA_HOME": "/root/.local/share"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=env
    )


@pytest.mark.needs("root")
@pytest.mark.parametrize("may_enter", [True, False])
async def test_command_of_a_claim_runs_as_its_user(
    node: Daemon, tmp_path: Path, *, may_enter: bool
) -> None:
    tmp_path.chmod(0o700)
    account = pwd.getpwnam("www-data")
    home = account.pw_dir if Path(account.pw_dir).is_dir() else "/"
    with claim_for(node, "www-data", Path("/usr") if may_enter else tmp_path) as command:
        try:
            lines = [command.stdout.readline().split() for _ in range(5)]
            assert lines[:2] == [[str(account.pw_uid)]] * 2, command.stderr.read()
            groups = os.getgrouplist("www-data", account.pw_gid)
            assert sorted(map(int, lines[2])) == sorted(groups)
            assert lines[3] == ["/usr" if may_enter else home]
            assert lines[4] == [account.pw_dir, "www-data", "www-data", account.pw_shell]
            assert as_user(node, "DELETE", "/v1/claims/c1") == "404 UnknownClaim"
            assert as_user(node, "DELETE", "/v1/claims/c1", user=account.pw_uid) == "204"
        finally:
            command.kill()


@pytest.mark.needs("root")
async def test_claim_for_an_unknown_user_claims_nothing(node: Daemon, tmp_path: Path) -> None:
    with claim_for(node, "no-such-user", tmp_path) as command:
        assert command.communicate(timeout=60) == ("", "Error: unknown user 'no-such-user'\n")
    assert command.returncode == 1
    assert await node.get("/v1/claims") == []
