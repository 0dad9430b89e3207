"""Files of credentials as people have them: every entry that `docker pull` finds."""

import asyncio
import json
import os
from base64 import b64encode
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from agentd.config.loading import load_text
from agentd.daemon.runtime_factory import login_conditions
from agentd.errors import RuntimeFailure, RuntimeUnavailable
from agentd.runtimes.docker import registry_auth
from agentd.runtimes.docker.registry_auth import (
    MAX_HELPERS,
    RegistryLogins,
    registry_auth_problems,
)
from agentd.tomlfile.regular_files import RegularFile, read_regular
from runtimes.field.conftest import ONE_GPU
from support.daemon import Daemon
from support.host_faults import hung_mount
from support.needs import require

HOST = "registry.example:5000"
IMAGE = f"{HOST}/team/project/image:1"
LOGIN = {"username": "ada", "password": "se:cret"}


def entry(user: str = "ada") -> dict[str, str]:
    return {"auth": b64encode(f"{user}:se:cret".encode()).decode()}


async def find(folder: Path, content: Mapping[str, Any], image: str = IMAGE) -> Any:
    """Return the credentials that a pull of an image sends, without the registry's address."""
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    credentials = await RegistryLogins(file).find(image)
    return credentials and {k: v for k, v in credentials.items() if k != "serveraddress"}


def write_helper(folder: Path, name: str, script: str) -> None:
    program = folder / f"docker-credential-{name}"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that agentd finds."""
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize(
    "key",
    [
        HOST,
        f"{HOST}/",
        f"http://{HOST}",
        f"https://{HOST}",
        f"https://{HOST}/",
        f"https://{HOST}/v1/",
        f"{HOST}/v2/",
        f"https://{HOST}/v2/",
        f"{HOST}/team",
        f"{HOST}/team/project",
        f"{HOST}/team/project/image",
        f"https://{HOST}/another",
    ],
)
async def test_login_is_found_under_every_key_of_a_host(folder: Path, key: str) -> None:
    assert await find(folder, {"auths": {"other.example": entry("no"), key: entry()}}) == LOGIN


@pytest.mark.parametrize(
    ("key", "image"),
    [
        ("https://index.docker.io/v1/", "busybox"),
        ("docker.io", "busybox:1"),
        ("index.docker.io", "docker.io/team/image"),
        ("registry-1.docker.io", "index.docker.io/team/image@sha256:0"),
        ("docker.io/team", "team/image"),
    ],
)
async def test_login_of_docker_hub_is_found_by_each_name(
    folder: Path, key: str, image: str
) -> None:
    assert await find(folder, {"auths": {key: entry()}}, image) == LOGIN


@pytest.mark.parametrize(
    ("image", "host"),
    [(IMAGE, HOST), ("busybox", "index.docker.io"), ("docker.io/a/b", "index.docker.io")],
)
async def test_login_is_sent_with_a_host_and_no_address(
    folder: Path, image: str, host: str
) -> None:
    """The containerd store compares it with the host that it pulls from."""
    file = folder / "config.json"
    file.write_text(json.dumps({"auths": {HOST: entry(), "docker.io": entry()}}))
    credentials = await RegistryLogins(file).find(image)
    assert credentials == {**LOGIN, "serveraddress": host}


@pytest.mark.parametrize(
    "key", ["registry.example", f"{HOST}0", "example:5000", "docker.io", f"other/{HOST}"]
)
async def test_login_of_another_host_is_not_sent(folder: Path, key: str) -> None:
    assert await find(folder, {"auths": {key: entry()}}) is None


async def test_longest_namespace_of_a_login_wins(folder: Path) -> None:
    users = ["", "/team", "/team/project", "/team/proj", "/team/project/image/x", "/zzz-longer-one"]
    auths = {f"{HOST}{path}": entry(path or "host") for path in users}
    assert (await find(folder, {"auths": auths}))["username"] == "/team/project"
    assert (await find(folder, {"auths": auths}, f"{HOST}/team/x"))["username"] == "/team"
    assert (await find(folder, {"auths": auths}, f"{HOST}/teams/x"))["username"] == "host"


@pytest.mark.parametrize(
    ("login", "sent"),
    [
        ({**LOGIN, "auth": ""}, LOGIN),
        (LOGIN, LOGIN),
        ({**LOGIN, "username": "x", **entry()}, LOGIN),
        ({"auth": "YWRhOnNl\nOmNyZXQ="}, LOGIN),
        ({"identitytoken": "t", "auth": ""}, {"identitytoken": "t"}),
        ({"registrytoken": "t"}, {"registrytoken": "t"}),
    ],
)
async def test_each_form_of_a_login_is_sent(folder: Path, login: Any, sent: Any) -> None:
    assert await find(folder, {"auths": {HOST: login}}) == sent


@pytest.mark.parametrize(
    "login",
    [
        *({"auth": "no base64"}, {"auth": b64encode(b"ada").decode()}, {"username": "x"}, 5, "x"),
        *({"username": "ada", "password": 5}, {"auth": ["x"]}, {"identitytoken": {"x": 1}}),
    ],
)
async def test_unusable_login_is_named(folder: Path, login: Any) -> None:
    with pytest.raises(RuntimeFailure, match=r"config\.json: .*cannot be used"):
        await find(folder, {"auths": {HOST: login, "other.example": entry()}})
    [problem] = registry_auth_problems("runtime.docker.registry-auth", folder / "config.json")
    assert f"auths.{HOST} cannot be used" in problem.why


@pytest.mark.parametrize("member", ["credsStore", "credHelpers"])
async def test_helper_is_run_with_the_registry(
    programs: Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    """A service of systemd has no HOME, without which the helper of ECR hangs."""
    monkeypatch.delenv("HOME", raising=False)
    answer = '{"ServerURL": "x", "Username": "ada", "Secret": "se:cret"}'
    write_helper(
        programs, "vault", f"cat > {programs}/asked; env > {programs}/env; echo '{answer}'"
    )
    named = "vault" if member == "credsStore" else {f"https://{HOST}": "vault", "x": "no"}
    content = {member: named, "auths": {HOST: {}}}
    assert await find(programs, content) == LOGIN
    assert (programs / "asked").read_text() == HOST
    environment = (programs / "env").read_text()
    assert "HOME=/root\n" in environment
    assert ("AGENTD" in environment, "AGENTD_SEED" in os.environ) == (False, True)


@pytest.mark.parametrize("login", [{"email": "a@b"}, {"auth": ""}, {"auth": None}, None, ""])
async def test_entry_without_a_login_belongs_to_the_helper(programs: Path, login: Any) -> None:
    """Docker itself leaves such entries beside its store."""
    write_helper(programs, "vault", """echo '{"Username": "ada", "Secret": "se:cret"}'""")
    content = {"auths": {f"https://{HOST}/v1/": login}, "credsStore": "vault"}
    assert await find(programs, content) == LOGIN
    assert [*registry_auth_problems("registry-auth", programs / "config.json")] == []
    assert await find(programs, {**content, "credsStore": ""}) is None


async def test_helper_s_token_is_sent_as_one(programs: Path) -> None:
    write_helper(programs, "vault", """echo '{"Username": "<token>", "Secret": "t"}'""")
    assert await find(programs, {"credsStore": "vault"}) == {"identitytoken": "t"}


async def test_helper_without_a_login_leaves_the_file_s(programs: Path) -> None:
    write_helper(programs, "vault", "echo credentials not found in native keychain; exit 1")
    assert await find(programs, {"credsStore": "vault"}) is None
    assert await find(programs, {"credsStore": "vault", "auths": {HOST: entry()}}) == LOGIN
    absent = {"credsStore": "absent", "auths": {HOST: entry()}}
    assert await find(programs, absent) == LOGIN, "a laptop's config.json names its own store"


@pytest.mark.parametrize(
    ("script", "error", "reason"),
    [
        ("echo locked; exit 3", RuntimeUnavailable, "fails with exit status 3"),
        ("echo hello", RuntimeFailure, "answers without credentials"),
        (
            """echo '{"Username": 5, "Secret": "x"}'""",
            RuntimeFailure,
            "answers without credentials",
        ),
        ("sleep 60 & wait", RuntimeUnavailable, r"does not answer within 0\.3 s"),
        (None, RuntimeFailure, "cannot run: No such file or directory"),
    ],
)
async def test_helper_that_fails_is_refused_by_name(
    programs: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: Any, reason: str
) -> None:
    monkeypatch.setattr(registry_auth, "HELPER_TIMEOUT_S", 0.3 if "sleep" in str(script) else 30)
    if script is not None:
        write_helper(programs, "vault", script)
    with pytest.raises(error, match=f"docker-credential-vault {reason}"):
        await find(programs, {"credHelpers": {HOST: "vault"}})
    assert await find(programs, {"credHelpers": {"other.example": "vault"}}) is None


async def test_cancelled_pull_ends_its_helper(programs: Path) -> None:
    write_helper(programs, "vault", f"echo $$ > {programs}/pid; exec sleep 60")
    pull = asyncio.create_task(find(programs, {"credsStore": "vault"}))
    async with asyncio.timeout(20):
        while not (programs / "pid").exists() or not (programs / "pid").read_text().strip():
            await asyncio.sleep(0.02)
    pid = int((programs / "pid").read_text())
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    async with asyncio.timeout(20):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


async def test_pulls_of_one_registry_share_a_helper(programs: Path) -> None:
    """A caller who may create decides how many pulls there are."""
    answer = '{"Username": "ada", "Secret": "se:cret"}'
    runs = programs / "runs"
    wait = f"while [ ! -e {programs}/open ]; do sleep 0.02; done"
    write_helper(programs, "vault", f"echo 1 >> {runs}; {wait}; echo '{answer}'; echo -1 >> {runs}")
    (programs / "config.json").write_text('{"credsStore": "vault"}')
    logins = RegistryLogins(programs / "config.json")
    images = [f"{HOST}/team/x:{number}" for number in range(20)]
    images += [f"r{number}.example/x:1" for number in range(20)]
    pulls = [asyncio.create_task(logins.find(image)) for image in images]
    async with asyncio.timeout(20):
        while not runs.exists() or runs.read_text().count("1") < MAX_HELPERS:
            await asyncio.sleep(0.02)
        pulls[0].cancel()
        (programs / "open").touch()
        found = await asyncio.gather(*pulls, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(login, dict) and login["username"] == "ada" for login in found[1:])
    steps = [int(line) for line in runs.read_text().splitlines()]
    assert steps.count(1) == 21
    assert max(accumulate(steps)) == MAX_HELPERS


@pytest.mark.parametrize("name", ["", None])
async def test_registry_without_a_helper_has_the_file_s_login(programs: Path, name: Any) -> None:
    """So Docker is told to leave its store aside; a missing member can be null as well."""
    write_helper(programs, "vault", """echo '{"Username": "bob", "Secret": "x"}'""")
    content = {"auths": {HOST: entry()}, "credHelpers": {HOST: name}, "credsStore": "vault"}
    assert await find(programs, content) == LOGIN
    assert (await find(programs, content, "other.example/x") or {})["username"] == "bob"
    for member in ("credHelpers", "credsStore"):
        assert await find(programs, {"auths": {HOST: entry()}, member: None}) == LOGIN
    assert await find(programs, {"auths": None}) is None


async def test_helper_of_another_registry_is_not_checked(folder: Path) -> None:
    content = {"auths": {HOST: entry()}, "credHelpers": {"other.example": "a b"}}
    assert await find(folder, content) == LOGIN
    problems = registry_auth_problems("runtime.docker.registry-auth", folder / "config.json")
    assert [p.why.partition(": ")[2] for p in problems] == [
        "credHelpers.other.example is not the name of a credential helper"
    ]


async def test_file_that_is_nested_too_deeply_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(RuntimeFailure, match="is nested too deeply"):
        await RegistryLogins(folder / "config.json").find(IMAGE)


async def test_helper_leaves_nothing_behind(programs: Path) -> None:
    """A daemon that it starts keeps its pipe open, and would be waited for."""
    answer = '{"Username": "ada", "Secret": "se:cret"}'
    write_helper(programs, "vault", f"sleep 60 & echo $! > {programs}/pid; echo '{answer}'")
    async with asyncio.timeout(20):
        assert await find(programs, {"credsStore": "vault"}) == LOGIN
        while Path(f"/proc/{int((programs / 'pid').read_text())}/exe").exists():
            await asyncio.sleep(0.02)


async def test_helper_that_prints_without_end_fills_no_memory(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_auth, "HELPER_TIMEOUT_S", 1.0)
    write_helper(programs, "vault", f"head -c 1G /dev/zero | tee {programs}/printed")
    with pytest.raises(RuntimeUnavailable, match="does not answer within 1 s"):
        await find(programs, {"credsStore": "vault"})
    assert (programs / "printed").stat().st_size < 2**20


@pytest.mark.parametrize("name", ["../../tmp/x", "a b", "x/y"])
async def test_helper_with_a_path_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(RuntimeFailure, match="credsStore is not the name of a credential helper"):
        await find(folder, {"credsStore": name})


@pytest.mark.parametrize(("mode", "owner"), [(0o666, 0), (0o600, 1000)])
async def test_helper_is_not_run_from_a_file_of_others(
    programs: Path, mode: int, owner: int
) -> None:
    """Its owner would choose a program that runs as root."""
    if owner:
        require("root")
    (programs / "config.json").touch()
    (programs / "config.json").chmod(mode)
    os.chown(programs / "config.json", owner or -1, -1)
    with pytest.raises(RuntimeFailure, match="other users can write to it"):
        await find(programs, {"credsStore": "vault"})


TEAM, OTHER = 1001, 1002
LINKS = {
    "a link of root": ([("link", "file", 0)], 0, True),
    "a link of a team to its own file": ([("link", "file", TEAM)], TEAM, True),
    "a link of root to one of a team": ([("link", "a", 0), ("a", "file", TEAM)], TEAM, True),
    "a link of a team to another's file": ([("link", "file", TEAM)], OTHER, False),
    "a link of a team to root's file": ([("link", "file", TEAM)], 0, False),
    "a link of root to one of another": ([("link", "a", 0), ("a", "file", OTHER)], TEAM, False),
    "a folder that is a link of a team": ([("a", ".", TEAM), ("link", "a/file", 0)], 0, False),
    "a link without an end": ([("link", "a", 0), ("a", "link", 0)], 0, False),
}


@pytest.mark.parametrize(("links", "owner", "is_used"), LINKS.values(), ids=LINKS)
async def test_link_leads_to_nobody_else_s_logins(
    folder: Path, links: list[tuple[str, str, int]], owner: int, *, is_used: bool
) -> None:
    """A team that may write to the folder of its file would use the login of another."""
    require("root")
    (folder / "file").write_text(json.dumps({"auths": {HOST: entry()}}))
    os.chown(folder / "file", owner, -1)
    for name, target, user in links:
        (folder / name).symlink_to(target)
        os.chown(folder / name, user, -1, follow_symlinks=False)
    if is_used:
        assert await RegistryLogins(folder / "link").find(IMAGE) is not None
        return
    with pytest.raises(RuntimeFailure, match=r"is a link of another user|levels of symbolic links"):
        await RegistryLogins(folder / "link").find(IMAGE)


async def test_file_that_is_replaced_while_it_is_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "config.json"
    (folder / "other").write_text(json.dumps({"auths": {HOST: entry()}}))
    file.symlink_to("other")

    def read_and_replace(path: Path, walk: object) -> RegularFile:
        content = read_regular(path)
        file.unlink()
        file.symlink_to("config.json")
        return content

    monkeypatch.setattr(registry_auth, "read_configured", read_and_replace)
    with pytest.raises(RuntimeFailure, match="was replaced while it was read"):
        await RegistryLogins(file).find(IMAGE)


def test_check_names_every_entry_that_cannot_be_used(folder: Path) -> None:
    file = folder / "config.json"
    content = {
        "auths": {"a.example": entry(), "b.example": {}, "c.example": {"auth": "!"}},
        "credHelpers": {"d.example": "absent"},
    }
    file.write_text(json.dumps(content))
    problems = [p.why for p in registry_auth_problems("runtime.docker.registry-auth", file)]
    assert [text.split(":")[1].split()[0] for text in problems] == [
        "auths.c.example",
        "credHelpers.d.example",
    ]
    del content["credHelpers"]
    file.write_text(json.dumps(content))
    problems = [p.why for p in registry_auth_problems("runtime.docker.registry-auth", file)]
    assert any("auths.b.example" in text for text in problems)
    file.unlink()
    [missing] = registry_auth_problems("runtime.docker.registry-auth", file)
    assert "No such file" in missing.why


def test_unusable_logins_are_conditions_of_their_users(folder: Path) -> None:
    for name in ("node", "team"):
        auths = {f"{name}.example": {"auth": "?"}}
        (folder / f"{name}.json").write_text(json.dumps({"auths": auths}))
    text = f"""
        runtime.docker.registry-auth = "{folder}/node.json"
        [[agents]]
        id = "a"
        registry-auth = "{folder}/team.json"
        [[agents]]
        id = "b"
    """
    conditions = [*login_conditions(load_text(text, folder / "agent.toml", {}).settings)]
    reason = "cannot be used: auth is not the base64 of user:password"
    assert [(item.about, item.reason) for item in conditions] == [
        (
            "runtime/docker",
            f"runtime.docker.registry-auth: {folder}/node.json: auths.node.example {reason}",
        ),
        ("agent/a", f"agents.0.registry-auth: {folder}/team.json: auths.team.example {reason}"),
    ]


async def test_conditions_of_logins_follow_a_reload(field_node: Daemon, folder: Path) -> None:
    """Otherwise a mended file stays a condition, and a new one never becomes one."""
    for name in ("a", "b"):
        (folder / name).write_text(json.dumps({"auths": {"r.example": {"auth": "?"}}}))
        (folder / name).chmod(0o600)
    for name in ("a", "b", ""):
        field_node.configure(f'registry-auth = "{folder / name}"\n' * bool(name) + ONE_GPU)
        if name == "a":
            await field_node.start()
        assert (await field_node.call("POST", "/v1/reload")).json == {"needs_restart": []}
        conditions = (await field_node.get("/v1/node"))["conditions"]
        named = [item["reason"] for item in conditions if "registry-auth" in item["reason"]]
        assert [f"{folder / name}: auths" in reason for reason in named] == [True] * bool(name)


async def test_folder_that_hangs_is_named_and_hides_no_login(
    field_node: Daemon, folder: Path
) -> None:
    require("fuse")
    (folder / "hung").mkdir()
    named = f'registry-auth = "{folder}/absent"\nallowed-mounts = ["{folder}/hung"]\n'
    field_node.configure(named + ONE_GPU)
    with hung_mount(folder / "hung"):
        await field_node.start()
        conditions = (await field_node.get("/v1/node?check=true"))["conditions"]
    reasons = "\n".join(item["reason"] for item in conditions)
    assert "not answer" in reasons
    assert f"{folder}/hung" in reasons
    assert f"{folder}/absent: cannot be read" in reasons
