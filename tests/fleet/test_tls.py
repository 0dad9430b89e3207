"""TLS from gateways and publishers to etcd and to nodes."""

import ssl
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from agentd.http.credentials import key_pair_weaknesses
from agentd.program.weaknesses import Weakness, Weaknesses
from agentd_fleet import credentials
from agentd_fleet.cli import agentd_fleet
from agentd_fleet.join.options import JoinOptions, etcd_tls_context
from agentd_fleet.settings import load
from support.certificates import certificate, certificate_of_version_2, certificate_that_ends


def gateway_tls(folder: Path, ca: Path | None) -> ssl.SSLContext:
    file = folder / "fleet.toml"
    file.write_text('[fleet]\nname = "main"\n' if ca is None else f'[fleet]\nca = "{ca}"\n')
    context = credentials.etcd_credentials(load(str(file), {}).fleet).tls
    assert context is not None
    return context


def publisher_tls(folder: Path, ca: Path | None) -> ssl.SSLContext:
    options = JoinOptions(
        name="main",
        etcd=(),
        ca=None if ca is None else str(ca),
        socket="/run/agentd.sock",
        lease=15,
        state_dir=str(folder),
    )
    return etcd_tls_context(options)


def handshake(folder: Path, trusts: ssl.SSLContext) -> None:
    """Connect a client to a server, `etcd-1`, with the certificate in a folder."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert", folder / "key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = trusts.wrap_bio(to_client, to_server, server_hostname="etcd-1")
    for end in (client, server):
        with pytest.raises(ssl.SSLWantReadError):
            end.do_handshake()
    client.do_handshake()


@pytest.mark.parametrize("is_system_ca", [False, True])
@pytest.mark.parametrize("tls_of", [gateway_tls, publisher_tls])
def test_fleet_trusts_private_ca_without_key_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls_of, is_system_ca: bool
) -> None:
    folders = [tmp_path / name for name in ("ca", "other", "server")]
    for folder in folders:
        folder.mkdir()
    (ca, key), (other, _) = certificate(folders[0]), certificate(folders[1])
    issued = ["-CA", str(ca), "-CAkey", str(key), "-addext", "subjectAltName=DNS:etcd-1"]
    certificate(folders[2], *issued, "-addext", "basicConstraints=critical,CA:FALSE")

    def trusting(file: Path) -> ssl.SSLContext:
        monkeypatch.setenv("SSL_CERT_FILE", str(file) if is_system_ca else "")
        return tls_of(tmp_path, None if is_system_ca else file)

    handshake(folders[2], trusting(ca))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folders[2], trusting(other))


@pytest.mark.parametrize(("section", "prefix"), [("fleet", ""), ("gateway", "tls-")])
def test_check_config_reports_the_end_of_a_certificate(
    tmp_path: Path, section: str, prefix: str
) -> None:
    cert, key = certificate_that_ends(tmp_path, 13)
    file = tmp_path / "fleet.toml"
    file.write_text(f'[{section}]\n{prefix}cert = "{cert}"\n{prefix}key = "{key}"\n')

    def checked() -> tuple[int, str]:
        done = CliRunner().invoke(agentd_fleet, ["check-config", "--config", str(file)])
        return done.exit_code, done.output

    status, output = checked()
    assert (status, f"warning: {cert} expires at " in output) == (0, True)
    certificate_that_ends(tmp_path, -1)
    status, output = checked()
    assert (status, f"{section}.{prefix}cert: {cert} expired at " in output) == (78, True)
    certificate_that_ends(tmp_path, 15)
    assert checked() == (0, "configuration OK\n")
    certificate_of_version_2(cert)
    assert checked() == (0, "configuration OK\n")


def test_check_config_names_the_key_of_an_unusable_certificate(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'[gateway]\ntls-cert = "{tmp_path}/cert"\ntls-key = "{tmp_path}/key"\n')
    done = CliRunner().invoke(agentd_fleet, ["check-config", "--config", str(file)])
    assert done.exit_code == 78
    assert f"gateway.tls-cert: {tmp_path}/cert cannot be read" in done.output


@pytest.mark.parametrize("days", [13, 15])
async def test_publisher_warns_of_the_end_of_its_certificate(tmp_path: Path, days: int) -> None:
    cert, key = certificate_that_ends(tmp_path, days)
    found = msgspec.json.encode(key_pair_weaknesses(cert, key))
    weaknesses = Weaknesses()
    weaknesses.replace(msgspec.json.decode(found, type=tuple[Weakness, ...]))
    assert len(weaknesses.warnings()) == (days < 14)
