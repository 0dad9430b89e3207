"""Credentials of a publisher that change on disk, and what a publisher says that cannot start."""

import asyncio
import shutil
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import pytest
from structlog.testing import capture_logs

from agentd_fleet.cli import _read_join_options
from agentd_fleet.join.options import JoinCredentials, JoinOptions
from agentd_fleet.store.etcd_client import EtcdClient, KeyValue
from agentd_fleet.store.etcd_transport import EtcdCredentials
from end_to_end.fleet.etcd_server import EtcdServers
from end_to_end.fleet.fleet_world import Program, World
from support.certificates import certificate, certificate_that_ends
from support.waiting import until

OLD, NEW = "the-first", "the-second"
NAMES = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:TRUE")


def hang_up(program: Program) -> None:
    assert program.process is not None
    program.process.send_signal(signal.SIGHUP)


async def free_key(etcd: EtcdClient, node: str) -> KeyValue | None:
    return await etcd.get(f"/agentd/main/free/{node}")


async def start_with_users(world: World) -> tuple[EtcdServers, str, EtcdClient]:
    """Start an etcd with a user for a node and one for this test."""
    servers = await world.start_etcd(is_own=True)
    (node,) = await world.start_nodes("none")
    keys = tuple(f"/agentd/main/{part}/{node}" for part in ("nodes", "free", "known"))
    await servers.require_logins(OLD, **{node: keys, "gate": ("/agentd/main/",)})
    return servers, node, EtcdClient(EtcdCredentials(servers.endpoints, "gate", OLD))


async def until_updated(world: World, etcd: EtcdClient, node: str) -> KeyValue:
    """Wait until a change of the node is published."""
    before = await free_key(etcd, node)
    assert before is not None
    created = await world.nodes[node].create(slots={"cpu": 1})
    assert created.status == 201
    pair = await until(
        lambda: free_key(etcd, node),
        lambda pair: pair is not None and pair.value != before.value,
        within_s=40,
    )
    assert pair.create_revision == before.create_revision, "the node was lost"
    return pair


@pytest.mark.parametrize("is_asked", [True, False], ids=["after a hangup", "when refused"])
async def test_new_password_is_used(world: World, folder: Path, *, is_asked: bool) -> None:
    """Reading it takes longer than a third of the deadline of a call, with three endpoints."""
    servers, node, client = await start_with_users(world)
    endpoints = [(await world.proxy(servers.endpoints[0])).endpoint for _ in range(3)]
    (folder / "sitecustomize.py").write_text("import time\ntime.sleep(1.5)\n")
    slow = {"PYTHONPATH": str(folder)}
    table = world.kept_as(node, OLD, endpoints=endpoints)
    async with client as etcd:
        publisher = world.join(node, lease=30, kept_in=table, environ=slow)
        await until(lambda: free_key(etcd, node))
        await servers.change_password(node, NEW)
        world.kept_as(node, NEW)
        if is_asked:
            hang_up(publisher)
            await publisher.until_logged("publisher.reloaded")
        await servers.restart(0)  # simple tokens end with their member
        await until_updated(world, etcd, node)
        assert publisher.log.count("credential.replaced") == 1
        assert publisher.is_running


def write_password(folder: Path, text: str, mode: int = 0o600) -> None:
    file = next(folder.glob("password-n-*"))
    file.write_text(text)
    file.chmod(mode)


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "an empty password": lambda folder: write_password(folder, ""),
    "a password that all can read": lambda folder: write_password(folder, OLD, 0o644),
    "no password": lambda folder: next(folder.glob("password-n-*")).unlink(),
    "an expired certificate": lambda folder: certificate_that_ends(folder / "pair", -1),
    "half a certificate": lambda folder: (folder / "pair/cert").write_text("-----BEGIN CERT"),
    "no key": lambda folder: (folder / "pair/key").unlink(),
    "an unknown setting": lambda folder: (folder / "join-0.toml").write_text("[fleet]\nx = 1\n"),
}


@pytest.mark.parametrize("spoil", UNUSABLE.values(), ids=UNUSABLE)
async def test_publisher_goes_on_with_its_old_credentials_after(
    world: World, spoil: Callable[[Path], object]
) -> None:
    _, node, client = await start_with_users(world)
    (world.folder / "pair").mkdir()
    cert, key = certificate_that_ends(world.folder / "pair", 300)
    table = f'{world.kept_as(node, OLD)}cert = "{cert}"\nkey = "{key}"\n'
    async with client as etcd:
        publisher = world.join(node, lease=30, kept_in=table)
        await until(lambda: free_key(etcd, node))
        spoil(world.folder)
        hang_up(publisher)
        await publisher.until_logged("publisher.reload_refused")
        assert "publisher.reloaded" not in publisher.log
        await until_updated(world, etcd, node)


OWN: dict[str, Callable[[EtcdCredentials], object]] = {
    "password": lambda credentials: credentials.password,
    "pair": lambda credentials: credentials.tls,
}
SPOILED: dict[tuple[str, str], Callable[[Path], object]] = {
    ("an open password", "pair"): lambda folder: (folder / "password").chmod(0o644),
    ("no key", "password"): lambda folder: (folder / "key").unlink(),
    ("an expired pair", "password"): lambda folder: certificate_that_ends(folder, -1),
    ("an unknown key", "password"): lambda folder: add_unknown_key(folder / "fleet.toml"),
    ("an unknown key", "pair"): lambda folder: add_unknown_key(folder / "fleet.toml"),
}


def add_unknown_key(config: Path) -> None:
    config.write_text(f"{config.read_text()}typo = 1\n")


@pytest.mark.parametrize(("spoiled", "renewed"), SPOILED)
async def test_unusable_setting_of_a_publisher_does_not_hold_back(
    tmp_path: Path, spoiled: str, renewed: str
) -> None:
    password, config = tmp_path / "password", tmp_path / "fleet.toml"
    cert, key = certificate_that_ends(tmp_path, 300)
    password.touch(0o600)
    password.write_text("the-first-password")
    config.write_text(
        f'[fleet]\netcd = ["https://127.0.0.1:1"]\netcd-user = "n"\nca = "{cert}"\n'
        f'etcd-password-file = "{password}"\ncert = "{cert}"\nkey = "{key}"\n[join]\n'
    )
    options = msgspec.json.decode(_read_join_options(str(config)), type=JoinOptions)
    etcd = EtcdClient(options.to_credentials())
    before = etcd.credentials
    if renewed == "pair":
        certificate_that_ends(tmp_path, 200)
    else:
        password.write_text("the-second-password")
    SPOILED[spoiled, renewed](tmp_path)
    credentials = JoinCredentials(options)
    with capture_logs() as logged:
        await credentials._reload(etcd)
    assert [line["event"] for line in logged].count("publisher.reload_refused") == 1
    assert OWN[renewed](before) != OWN[renewed](etcd.credentials)
    if spoiled != "an unknown key":
        (kept,) = OWN.keys() - {renewed}
        assert OWN[kept](before) == OWN[kept](etcd.credentials)
    with capture_logs() as logged:
        await credentials._reload(etcd)
    assert not logged, "the next attempt finds nothing new"


@pytest.mark.parametrize("user", ["", "n"])
def test_password_goes_with_its_user_through_several_mistakes(tmp_path: Path, user: str) -> None:
    """Another user whose password is missing, then there, beside a typo; at last without it."""
    config, base = tmp_path / "fleet.toml", '[fleet]\netcd = ["http://127.0.0.1:1"]\n'
    for name in ("n", "m"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(f"the-password-of-{name}")

    def login(name: str) -> str:
        return f'etcd-user = "{name}"\netcd-password-file = "{tmp_path}/{name}"\n' if name else ""

    def read(text: str, in_force: bytes = b"") -> tuple[bytes, tuple[str, str]]:
        config.write_text(f"{base}{text}")
        output = _read_join_options(str(config), in_force)
        options = msgspec.json.decode(output, type=JoinOptions)
        return output, (options.etcd_user, options.password)

    in_force, before = read(login(user))
    (tmp_path / "m").rename(tmp_path / "later")
    in_force, kept = read(login("m"), in_force)
    assert kept == before
    (tmp_path / "later").rename(tmp_path / "m")
    assert msgspec.json.decode(in_force, type=JoinOptions).read_times()[str(tmp_path / "m")]
    in_force, kept = read(f"{login('m')}typo = 1\n", in_force)
    assert kept == before
    assert read(login("m"), in_force)[1] == ("m", "the-password-of-m")


async def test_changed_file_is_read_at_once_after_an_unusable_one(tmp_path: Path) -> None:
    """A pause of ten seconds is longer than a lease."""
    password, key = tmp_path / "password", tmp_path / "key"
    password.touch()
    options = JoinOptions(
        name="main", etcd=(), etcd_password_file=str(password), key=str(key), socket="", lease=5,
        state_dir="",
    )  # fmt: skip
    credentials = JoinCredentials(options)
    assert [await credentials._have_changed() for _ in range(3)] == [True, False, False]
    password.unlink()
    assert [await credentials._have_changed() for _ in range(2)] == [True, False]


@pytest.mark.parametrize("is_asked", [True, False], ids=["after a hangup", "when refused"])
async def test_renewed_client_pair_is_used_for_etcd(world: World, *, is_asked: bool) -> None:
    """Two endpoints: the first takes the old certificate alone, the second the new one alone."""
    servers = await world.start_etcd(is_own=True)
    (node,) = await world.start_nodes("none")
    folders = [world.folder / name for name in ("server", "client", "next")]
    for folder in folders:
        folder.mkdir()
    server, client, following = (certificate(folder, *NAMES) for folder in folders)
    proxies = []
    for trusted in (client, following):
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=trusted[0])
        tls.verify_mode = ssl.CERT_REQUIRED
        tls.load_cert_chain(*server)
        proxies.append(await world.proxy(servers.endpoints[0], tls))
    table = f'[fleet]\netcd = ["{proxies[0].endpoint}", "{proxies[1].endpoint}"]\n'
    table += f'ca = "{server[0]}"\ncert = "{client[0]}"\nkey = "{client[1]}"\n'
    async with world.client() as etcd:
        publisher = world.join(node, lease=30, kept_in=table)
        await until(lambda: free_key(etcd, node))
        for source, target in zip(following, client, strict=True):
            shutil.copy(source, target)
        if is_asked:
            hang_up(publisher)
            await publisher.until_logged("publisher.reloaded")
        await proxies[0].cut()
        await until_updated(world, etcd, node)
        assert publisher.log.count("credential.replaced") == 1


async def test_publisher_of_no_daemon_says_so_once(world: World, folder: Path) -> None:
    await world.start_etcd()
    (node,) = await world.start_nodes("none")
    path = world.nodes[node].folder / "agentd.sock"
    config = f'{world.kept_in}[join]\nsocket = "{folder}/wrong.sock"\nstate-dir = "{folder}/i"\n'
    program = Program(world.folder, "join-wrong", "join", config)
    program.environ["NOTIFY_SOCKET"] = str(folder / "notify")
    world.programs.append(program)
    with Manager(folder / "notify") as manager:
        program.start()
        await program.until_logged("node.unreachable")
        assert f"{folder}/wrong.sock" in program.log
        await manager.until_status(f"not in the fleet: {folder}/wrong.sock: unreachable: ")
        (folder / "wrong.sock").symlink_to(path)
        await manager.until_status(f"node {node} is in fleet main")
        assert program.log.count("node.unreachable") == 1
        second = world.join(node)
        await second.until_logged("is taken by")
        await manager.until_status(f"another publisher, at unix:{path}, waits for the node id")
        await second.stop()
        await manager.until_status(f"node {node} is in fleet main")


class Manager:
    """The socket of systemd; its messages."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def until_status(self, text: str) -> None:
        """Wait until a status has a text."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(40):
            while text not in (await loop.sock_recv(self._socket, 65536)).decode():
                pass
