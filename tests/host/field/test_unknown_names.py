"""Users, groups and files that are not there yet when agentd starts: what needs them waits."""

import contextlib
import pwd
import signal
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from end_to_end.conftest import plain
from end_to_end.containers import printed
from end_to_end.test_tokens import Tokens, tokens
from native.libraries import built
from support.certificates import certificate
from support.daemon import Daemon, gpus
from support.waiting import until

__all__ = ["plain", "tokens"]

TEAMS = (
    '[[agents]]\nid = "local"\nuser = "daemon"\n'
    '[[agents]]\nid = "ldap"\nuser = "bin"\n'
    '[[agents]]\nid = "default"\n' + gpus()
)
"""The users of a host that a directory may know later."""
HOST = """
import os, pathlib
from agentd.program import name_service
folder, find_entry = pathlib.Path(os.environ["UNKNOWN"]), name_service.find_entry
name_service.find_entry = lambda function, name: (
    None if (folder / str(name)).exists() else find_entry(function, name))
from agentd.daemon import host_names, reload
reload.RETRY_S, host_names.ALL_EVERY = 0.2, 2
members = folder / "groups"
os.getgrouplist = lambda name, gid: [gid, *map(int, members.read_text().split())]
from agentd.cli.agentd.main import agentd
agentd()
"""
"""agentd on a host that does not know the names of the files in a folder."""


class Host:
    """A daemon, and the names that its host does not know."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.unknown = daemon.folder / "unknown"
        self.unknown.mkdir()
        (self.unknown / "groups").touch()
        daemon.program = ("-c", HOST)

    def forget(self, *names: str) -> None:
        for name in names:
            (self.unknown / name).touch()

    def learn(self, name: str) -> None:
        (self.unknown / name).unlink()

    async def start(self, text: str) -> None:
        await self.daemon.start(text, UNKNOWN=str(self.unknown))

    async def refused(self, agent: str, **body: Any) -> str:
        """Return the detail of a create that is refused for a moment."""
        answer = await self.daemon.create(agent, **body)
        assert (answer.status, answer.json["code"]) == (503, "NotReady"), answer
        assert int(answer.headers["Retry-After"]) > 0
        return answer.json["detail"]

    async def conditions(self) -> dict[str, str]:
        """Return the reasons by subject."""
        found = (await self.daemon.get("/v1/node"))["conditions"]
        return {condition["about"]: condition["reason"] for condition in found}

    async def until_no_condition(self, about: str) -> None:
        await until(self.conditions, lambda found: about not in found, within_s=20)


@pytest.fixture
def host(plain: Daemon) -> Host:
    return Host(plain)


@pytest.mark.needs("root")
async def test_unknown_user_concerns_its_agent_alone(host: Host) -> None:
    daemon = host.daemon
    host.forget("bin")
    await host.start(TEAMS)
    why = "agents.1.user: no user 'bin' on this host"
    for query in ("", "?dry_run=true"):
        assert await host.refused("ldap", query=query) == f"kernels of ldap cannot start: {why}"
    assert await host.conditions() == {"agent/ldap": why}
    assert (await daemon.call("GET", "/readyz")).status == 200
    for agent, user in (("local", "daemon"), ("default", "nobody")):
        kernel = await daemon.running(agent)
        assert Path(f"/proc/{daemon.main_pid(kernel)}").owner() == user
    host.learn("bin")
    await host.until_no_condition("agent/ldap")
    kernel = await daemon.running("ldap", slots={"cuda.device": 1})
    assert Path(f"/proc/{daemon.main_pid(kernel)}").owner() == "bin"


@pytest.mark.needs("root")
async def test_unknown_default_user_concerns_who_has_no_other(host: Host) -> None:
    host.forget("nobody")
    await host.start(TEAMS)
    why = "runtime.process.user: no user 'nobody' on this host"
    assert await host.conditions() == {"agent/default": why}
    assert why in await host.refused("default")
    await host.daemon.running("ldap")
    host.learn("nobody")
    await host.until_no_condition("agent/default")
    await host.daemon.running("default")


@pytest.mark.needs("root")
async def test_user_that_was_removed_is_one_that_is_not_there_yet(host: Host) -> None:
    """A reload looks users up again; kernels that run are left alone."""
    daemon = host.daemon
    await host.start(TEAMS)
    await daemon.running("ldap", kernel_id="k1")
    host.forget("bin")
    await daemon.running("ldap", kernel_id="k2")  # nobody looked
    assert (await daemon.call("POST", "/v1/reload")).json == {"needs_restart": []}
    assert "no user 'bin'" in await host.refused("ldap")
    assert {k["state"] for k in await daemon.get("/v1/kernels")} == {"running"}
    stopped = await daemon.call("POST", "/v1/kernels/k1/stop", {"timeout": 0})
    assert stopped.status == 200
    await daemon.stop(signal.SIGKILL)
    await daemon.start(UNKNOWN=str(host.unknown))
    assert (await daemon.get("/v1/kernels/k2"))["state"] == "running"


@pytest.mark.needs("root", "gcc")
async def test_outage_of_a_directory_forgets_no_name(host: Host, tmp_path: Path) -> None:
    """Only "not found" proves that a host does not know a name; a reload looks all names up."""
    daemon, down = host.daemon, tmp_path / "down"
    down.mkdir()
    library = built("silent.c", tmp_path / "silent.so")
    environ = {"LD_PRELOAD": str(library), "HANGING": str(down), "UNKNOWN": str(host.unknown)}
    text = f'{TEAMS}[runtime.process]\nallowed-groups = ["audio", "video"]\n'
    await daemon.start(text, **environ)
    failures = [down / f"{name}.fails" for name in ("bin", "video", "no-such-group")]
    for failure in failures:
        failure.touch()
    assert (await daemon.call("POST", "/v1/reload")).json == {"needs_restart": []}
    kernel = await daemon.running("ldap", groups=["audio"])
    assert Path(f"/proc/{daemon.main_pid(kernel)}").owner() == "bin"
    assert "cannot be looked up" in (await host.conditions())["agent/ldap"]
    for group in ("video", "no-such-group", "daemon"):
        refused = await daemon.create("ldap", groups=[group])
        assert (refused.status, refused.json["code"]) == (503, "RuntimeUnavailable"), group
    for failure in failures:
        failure.unlink()
    await host.until_no_condition("agent/ldap")
    await daemon.running("ldap", groups=["audio", "video"])
    assert (await daemon.create("ldap", groups=["daemon"])).status == 422


@pytest.mark.needs("root")
async def test_groups_that_a_directory_knows_late_are_given(host: Host) -> None:
    """Its user is known at once, such as one of the host, and only the primary group with it."""
    await host.start(TEAMS)
    groups = await printed(host.daemon, "id -G", agent="ldap")
    assert groups.split() == [str(pwd.getpwnam("bin").pw_gid)]
    (host.unknown / "groups").write_text("2000")
    await until(
        lambda: printed(host.daemon, "id -G", agent="ldap"),
        lambda groups: "2000" in groups.split(),
        within_s=20,
    )


@pytest.mark.needs("root")
async def test_unknown_group_concerns_requests_that_name_it(host: Host) -> None:
    host.forget("video")
    await host.start(f'{TEAMS}[runtime.process]\nallowed-groups = ["audio", "video"]\n')
    why = "runtime.process.allowed-groups.1: no group 'video' on this host"
    assert await host.conditions() == {
        f"agent/{name}": why for name in ("local", "ldap", "default")
    }
    assert "group 'video'" in await host.refused("ldap", groups=["video"])
    await host.daemon.running("ldap", groups=["audio"])
    host.learn("video")
    await host.until_no_condition("agent/ldap")
    await host.daemon.running("ldap", groups=["audio", "video"])


@pytest.mark.needs("root")
async def test_socket_of_an_unknown_group_is_private(host: Host) -> None:
    """The group of one team holds up nobody else."""
    path = host.daemon.folder / "team.sock"
    host.forget("audio")
    entry = f'[[rpc.sockets]]\npath = "{path}"\nrole = "read"\ngroup = "audio"\n'
    await host.start(entry + TEAMS)
    why = f"socket {path} is not given to group 'audio' yet: only agentd's user can connect"
    assert await host.conditions() == {"host": why}
    assert (path.stat().st_mode & 0o777, path.group()) == (0o600, "root")
    host.learn("audio")
    await host.until_no_condition("host")
    assert (path.stat().st_mode & 0o777, path.group()) == (0o660, "audio")


@pytest.mark.needs("root")
async def test_reload_revokes_a_token_while_a_user_is_unknown(tokens: Tokens) -> None:
    host = Host(tokens.daemon)
    host.forget("daemon")
    entries = [tokens.entry("boss", "admin"), tokens.entry("team", "agent", "team-a")]
    text = 'user = "daemon"\n'
    tokens.configure(*entries)
    config = tokens.daemon.config_file
    config.write_text(config.read_text().replace('id = "team-a"\n', f'id = "team-a"\n{text}'))
    await tokens.daemon.start(UNKNOWN=str(host.unknown))
    assert (await tokens.get("team")).status == 200
    config.write_text(config.read_text().replace(entries[1], ""))
    answer = await tokens.daemon.call("POST", "/v1/reload")
    assert (answer.status, answer.json) == (200, {"needs_restart": []})
    assert (await tokens.get("team")).status == 401
    assert "agent/team-a" in await host.conditions()


async def missing_files(daemon: Daemon) -> list[str]:
    return [text for text in await daemon.warnings() if "cannot be read" in text]


async def test_token_that_is_not_there_yet_is_not_accepted(tokens: Tokens) -> None:
    daemon, file = tokens.daemon, tokens.daemon.folder / "token-team"
    daemon.deadlines = {"agentd.daemon.reload.RETRY_S": 0.2}
    file.rename(daemon.folder / "later")
    tokens.configure(tokens.entry("team", "read"), tokens.entry("boss", "admin"))
    await daemon.start()
    assert [(await tokens.get(name)).status for name in ("boss", "team")] == [200, 401]
    (warning,) = await missing_files(daemon)
    assert warning.startswith(f"rpc.tokens.0.file: {file} cannot be read: No such file")
    (daemon.folder / "later").rename(file)
    await until(lambda: tokens.get("team"), lambda value: value.status == 200, within_s=20)
    assert await missing_files(daemon) == []


@pytest.mark.needs("openssl")
async def test_address_that_is_not_there_yet_holds_up_no_start(tokens: Tokens) -> None:
    """Such as that of an interface that waits for its lease, or one that moves between hosts."""
    daemon = tokens.daemon
    cert, key = certificate(daemon.folder)
    tls = f'tls-cert = "{cert}"\ntls-key = "{key}"\n'
    tokens.configure(tls, tokens.entry("boss", "admin"))
    config = daemon.config_file
    config.write_text(config.read_text().replace("127.0.0.1", "192.0.2.7"))
    await daemon.start()
    why = "nobody can connect to 192.0.2.7: Cannot assign requested address"
    assert why in await daemon.warnings()


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("missing", ["cert", "key"])
async def test_nothing_is_served_without_tls_before_its_certificate(
    tokens: Tokens, missing: str
) -> None:
    daemon = tokens.daemon
    daemon.deadlines = {"agentd.daemon.reload.RETRY_S": 0.2}
    cert, key = certificate(daemon.folder)
    path = cert if missing == "cert" else key
    path.rename(daemon.folder / "later")
    tls = f'tls-cert = "{cert}"\ntls-key = "{key}"\n'
    tokens.configure(tls, tokens.entry("boss", "admin"))
    await daemon.start()
    with pytest.raises(aiohttp.ClientError):
        await tokens.get("boss")  # without TLS
    trusted = ssl.create_default_context(cafile=None)
    trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE

    async def status() -> int:
        """Return the status of a request over TLS, 0 if there is no connection."""
        header = {"Authorization": f"Bearer {tokens.secrets['boss']}"}
        url = f"https://127.0.0.1:{tokens.port}/v1/whoami"
        with contextlib.suppress(aiohttp.ClientError):
            async with (
                aiohttp.ClientSession(headers=header) as session,
                session.get(url, ssl=trusted) as response,
            ):
                return response.status
        return 0

    assert await status() == 0
    (warning,) = await missing_files(daemon)
    assert f"rpc.tls-cert: {path} cannot be read: No such file" in warning
    (daemon.folder / "later").rename(path)
    await until(status, 200, within_s=20)
    assert await missing_files(daemon) == []
