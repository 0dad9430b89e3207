"""Certificates, tokens and passwords that change on disk while a gateway runs."""

import asyncio
import itertools
import shutil
import signal
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import agentd.http.credentials
from agentd.concurrency import Walk
from agentd.http.callers import Token
from agentd.http.credentials import read_guarded_token, read_tokens
from agentd.tomlfile.regular_files import MissingFile, SilentFile, UnusableFile
from agentd_fleet.credentials import GatewayCredentials, rpc_settings
from agentd_fleet.settings import load
from end_to_end.fleet.fleet_world import GatewayProgram, World
from end_to_end.fleet.network import Proxy
from end_to_end.prometheus import free_port
from support.certificates import certificate, certificate_that_ends
from support.daemon import AGENTS, BASE, Daemon
from support.waiting import until

SOON = {"agentd_fleet.credentials.RETRY_S": 0.2}
NAMES = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:TRUE")
NO_NODE = '[fleet]\nnodes = ["unix:/none.sock"]\n'


def renew(folder: Path, *, days: float = 300) -> tuple[Path, Path]:
    """Write another pair to the files of a folder."""
    folder.mkdir(exist_ok=True)
    return certificate_that_ends(folder, days)


async def served_certificate(port: int) -> bytes:
    """Return the certificate that a new connection gets."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return certificate


def hang_up(program: GatewayProgram) -> None:
    assert program.process is not None
    program.process.send_signal(signal.SIGHUP)


async def listening(
    world: World, *, deadlines: Mapping[str, float] | None = None
) -> tuple[GatewayProgram, Path, int]:
    """Start a gateway on TLS; return it, the folder of its pair and token, and its port."""
    folder, port = world.folder / "pair", free_port()
    cert, key = renew(folder)
    token = folder / "token"
    token.touch(0o600)
    token.write_text("a-token-of-a-caller\n")
    tables = f'listen = "127.0.0.1:{port}"\ntls-cert = "{cert}"\ntls-key = "{key}"\n'
    rpc = f'[rpc]\ntoken-file = "{token}"\n'
    gateway = world.gateway(NO_NODE, gateway=tables, rpc=rpc, deadlines=deadlines)
    await gateway.until({})
    return gateway, folder, port


async def test_renewed_pair_of_the_gateway_is_served_after_a_hangup(world: World) -> None:
    gateway, folder, port = await listening(world)
    before = await served_certificate(port)
    renew(folder)
    assert await served_certificate(port) == before
    hang_up(gateway)
    await gateway.until_logged("gateway.reloaded")
    assert await served_certificate(port) != before


async def test_pair_behind_links_that_are_swapped_is_served(world: World) -> None:
    """As the kubelet renews a mounted secret: https://github.com/dadrus/heimdall/issues/2926."""
    gateway, folder, port = await listening(world)
    before = await served_certificate(port)
    for number, days in enumerate((200, 250)):
        version = renew(folder / f"..{number}", days=days)[0].parent
        link = folder / "..new"
        link.symlink_to(version.name)
        link.rename(folder / "..data")
        for name in ("cert", "key"):
            (folder / name).unlink()
            (folder / name).symlink_to(f"..data/{name}")
        hang_up(gateway)
        await gateway.until_logged("gateway.reloaded", times=number + 1)
        assert await served_certificate(port) != before
        before = await served_certificate(port)


async def test_pair_that_is_half_renewed_at_the_hangup_is_served_later(world: World) -> None:
    gateway, folder, port = await listening(world, deadlines=SOON)
    before = await served_certificate(port)
    cert, key = renew(folder / "next")
    shutil.copy(cert, folder / "cert")
    hang_up(gateway)
    await gateway.until_logged("gateway.reload_refused")
    assert await served_certificate(port) == before
    shutil.copy(key, folder / "key")
    await gateway.until_logged("gateway.reloaded")
    assert await served_certificate(port) == ssl.PEM_cert_to_DER_cert(cert.read_text())
    assert gateway.log.count("gateway.reload_refused") == 1


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "an expired certificate": lambda folder: renew(folder, days=-1),
    "the key of another": lambda folder: shutil.copy(renew(folder / "other")[1], folder / "key"),
    "half a certificate": lambda folder: (folder / "cert").write_text("-----BEGIN CERT"),
    "no certificate": lambda folder: (folder / "cert").unlink(),
    "no key": lambda folder: (folder / "key").unlink(),
}


@pytest.mark.parametrize("spoil", UNUSABLE.values(), ids=UNUSABLE)
async def test_gateway_serves_on_with_its_old_pair_after(
    world: World, spoil: Callable[[Path], object]
) -> None:
    gateway, folder, port = await listening(world)
    before = await served_certificate(port)
    spoil(folder)
    token = folder / "token"
    token.write_text("another-token-of-a-caller\n")
    hang_up(gateway)
    await gateway.until_logged("gateway.reload_refused")
    assert "gateway.tls-cert: " in gateway.log
    assert "gateway.reloaded" not in gateway.log
    assert await served_certificate(port) == before
    headers = {"Authorization": "Bearer another-token-of-a-caller"}
    assert await status_over_tls(port, headers) == 200, "the tokens do not wait for the pair"
    renew(folder)
    hang_up(gateway)
    await gateway.until_logged("gateway.reloaded")
    assert await served_certificate(port) != before


async def status_over_tls(port: int, headers: dict[str, str]) -> int:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    lines = ["GET /v1/whoami HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def test_expired_client_pair_does_not_keep_a_token_in_force(world: World) -> None:
    """The pair for etcd has expired meanwhile; the revoked token of a caller still ends."""
    gateway, folder, port = await listening(world)
    cert, key = renew(world.folder / "client")
    text = gateway.file.read_text()
    gateway.file.write_text(text.replace("[fleet]\n", f'[fleet]\ncert = "{cert}"\nkey = "{key}"\n'))
    renew(world.folder / "client", days=-1)
    old = {"Authorization": "Bearer a-token-of-a-caller"}
    assert await status_over_tls(port, old) == 200
    (folder / "token").write_text("another-token-of-a-caller\n")
    hang_up(gateway)
    await gateway.until_logged("fleet.cert: ")
    assert await status_over_tls(port, old) == 401


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[tuple[Daemon, Path, str]]:
    """A node on TCP; the file of its gateway's token, and its address."""
    daemon, port, token = Daemon(tmp_path, "process"), free_port(), tmp_path / "node-token"
    daemon.node = f"t-{uuid.uuid4().hex[:12]}"
    token.touch(0o600)
    token.write_text("the-first-token-of-gateways\n")
    listed = f'[[rpc.tokens]]\nname = "g"\nfile = "{token}"\nrole = "admin"\ngateway = true\n'
    base = BASE.replace("[rpc]\n", f'[rpc]\nlisten = "127.0.0.1:{port}"\n')
    daemon.configure(AGENTS + listed, base)
    await daemon.start()
    yield daemon, token, f"http://127.0.0.1:{port}"
    await daemon.close()


@pytest.mark.parametrize("is_asked", [True, False], ids=["after a hangup", "when refused"])
async def test_new_node_token_is_used(world: World, node, is_asked: bool) -> None:
    daemon, listed, address = node
    own = world.folder / "gateway-token"
    shutil.copy(listed, own)
    gateway = world.gateway(
        f'[fleet]\nnodes = ["{address}"]\n',
        gateway=f'node-token-file = "{own}"\n',
        deadlines={} if is_asked else SOON,
    )
    await gateway.until({daemon.node: "ready"})
    assert (await gateway.create(kernel_id="k1")).status == 201
    listed.write_text("the-second-token-of-gateways\n")
    daemon.process.send_signal(signal.SIGHUP)
    await daemon.until_logged("daemon.reloaded")
    assert (await gateway.call("GET", "/v1/kernels/k1")).status == 503
    own.write_text("the-second-token-of-gateways\n")
    if is_asked:
        hang_up(gateway)
    await gateway.until_logged("credential.replaced")
    await until(lambda: gateway.call("GET", "/v1/kernels/k1"), lambda answer: answer.status == 200)
    await gateway.until({daemon.node: "ready"})
    assert (await gateway.create(kernel_id="k2")).status == 201
    assert (await gateway.get(f"/v1/nodes/{daemon.node}"))["reason"] == ""


class SeeingProxy(Proxy):
    """A proxy that keeps the certificates of its clients."""

    def __init__(self, target: str, tls: ssl.SSLContext) -> None:
        super().__init__(target, tls)
        self.seen: list[bytes] = []

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.append(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        super()._accepted(reader, writer)


async def test_renewed_client_pair_is_used_for_nodes(world: World) -> None:
    (node,) = await world.start_nodes("none")
    folders = [world.folder / name for name in ("server", "client", "next")]
    for folder in folders:
        folder.mkdir()
    server, client, following = (certificate(folder, *NAMES) for folder in folders)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client[0])
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_verify_locations(following[0])
    tls.load_cert_chain(*server)
    proxy = SeeingProxy(f"unix:{world.nodes[node].folder}/agentd.sock", tls)
    world.proxies.append(proxy)
    await proxy.start()
    fleet = f'[fleet]\nnodes = ["{proxy.endpoint}"]\nca = "{server[0]}"\n'
    fleet += f'cert = "{client[0]}"\nkey = "{client[1]}"\n'
    gateway = world.gateway(fleet)
    await gateway.until({node: "ready"})
    for source, target in zip(following, client, strict=True):
        shutil.copy(source, target)
    hang_up(gateway)
    await gateway.until_logged("credential.replaced")
    assert (await gateway.create(kernel_id="k1")).status == 201
    assert proxy.seen[-1] == ssl.PEM_cert_to_DER_cert(following[0].read_text())


@pytest.mark.parametrize("is_asked", [True, False], ids=["after a hangup", "when refused"])
async def test_password_of_etcd_is_read_again(world: World, *, is_asked: bool) -> None:
    servers = await world.start_etcd(is_own=True)
    await servers.require_logins("root", gate=("/agentd/main/",))
    gateway = world.gateway(world.kept_as("gate", "root"))
    await gateway.until_logged("gateway.ready")
    await until(lambda: gateway.call("GET", "/readyz"), lambda answer: answer.status == 200)
    await servers.change_password("gate", "new")
    world.kept_as("gate", "new")
    if is_asked:
        hang_up(gateway)
    await until(lambda: gateway.log, lambda log: "credential.replaced" in log, within_s=60)
    await until(lambda: gateway.call("GET", "/readyz"), lambda answer: answer.status == 200)
    assert (await gateway.create()).json["code"] == "UnknownAgent"


SECRETS = ("the-token-of-a-first-caller", "the-token-of-a-second-one")
FILES: dict[str, tuple[type[UnusableFile] | None, set[str]]] = {
    "is silent": (SilentFile, {SECRETS[0], "another"}),
    "is missing": (MissingFile, {"another"}),
    "is unusable": (UnusableFile, set(SECRETS)),
    "is there": (None, {SECRETS[0], "another"}),
}


@pytest.mark.parametrize(("error", "tokens"), FILES.values(), ids=FILES)
async def test_tokens_in_force_after_a_hangup_when_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[UnusableFile] | None,
    tokens: set[str],
) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file, secret in zip(files, SECRETS, strict=True):
        file.touch(0o600)
        file.write_text(secret)
    config = tmp_path / "fleet.toml"
    tables = [f'[[rpc.tokens]]\nname = "{f.name}"\nfile = "{f}"\nrole = "read"\n' for f in files]
    config.write_text(f'{NO_NODE}[gateway]\nlisten = "127.0.0.1:7001"\n{"".join(tables)}')
    settings = load(str(config), {})
    server = FakeServer(read_tokens(rpc_settings(settings)))
    credentials = GatewayCredentials(settings, lambda: settings)
    files[1].write_text("another")

    def read(file: Path, walk: Walk | None = None) -> str:
        if error is not None and file == files[0]:
            raise error("cannot be read")
        return read_guarded_token(file, walk)

    monkeypatch.setattr(agentd.http.credentials, "read_guarded_token", read)
    assert await credentials._read_all(server) is (error is None)
    assert {token.secret for token in server.current_tokens} == tokens
    monkeypatch.undo()
    assert await credentials._read_all(server)
    assert {token.secret for token in server.current_tokens} == {SECRETS[0], "another"}


OWN: dict[str, Callable[[GatewayCredentials], object]] = {
    "node-token": lambda credentials: credentials.own.node_token,
    "etcd-password": lambda credentials: credentials.own.etcd.login,
    "client-pair": lambda credentials: credentials.own.tls_files,
}


def write_own(folder: Path, name: str, secret: str) -> None:
    """Write another credential of a gateway."""
    if name == "client-pair":
        renew(folder)
    else:
        (folder / name).touch(0o600)
        (folder / name).write_text(secret)


@pytest.mark.parametrize(
    ("spoiled", "renewed"),
    [*itertools.permutations(OWN, 2), *(("settings", name) for name in OWN)],
)
async def test_unusable_credential_does_not_hold_back(
    tmp_path: Path, spoiled: str, renewed: str
) -> None:
    for name in OWN:
        write_own(tmp_path, name, f"the-first-secret-of-{name}")
    config = tmp_path / "fleet.toml"
    config.write_text(
        '[fleet]\netcd = ["https://127.0.0.1:1"]\netcd-user = "gate"\n'
        f'etcd-password-file = "{tmp_path}/etcd-password"\nca = "{tmp_path}/cert"\n'
        f'cert = "{tmp_path}/cert"\nkey = "{tmp_path}/key"\n'
        f'[gateway]\nnode-token-file = "{tmp_path}/node-token"\n'
    )
    settings = load(str(config), {})
    credentials = GatewayCredentials(settings, lambda: load(str(config), {}))
    before = {name: read(credentials) for name, read in OWN.items()}
    write_own(tmp_path, renewed, f"the-second-secret-of-{renewed}")
    if spoiled == "client-pair":
        (tmp_path / "key").unlink()
    elif spoiled == "settings":
        config.write_text(f"{config.read_text()}typo = 1\n")
    else:
        (tmp_path / spoiled).chmod(0o644)
    with capture_logs() as logged:
        assert not await credentials._read_all(FakeServer(()))
    events = [line["event"] for line in logged]
    assert events.count("credential.replaced") == events.count("gateway.reload_refused") == 1
    after = {name: read(credentials) for name, read in OWN.items()}
    assert [name for name in OWN if before[name] != after[name]] == [renewed]
    assert credentials.own.etcd.tls is credentials.own.tls


class FakeServer:
    """The tokens of a server without TLS."""

    has_tls = False

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self.current_tokens = tokens

    def replace_tokens(self, tokens: tuple[Token, ...]) -> None:
        self.current_tokens = tokens
