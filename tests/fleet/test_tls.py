"""TLS from gateways and publishers to etcd and to nodes."""

import ssl
from pathlib import Path

import pytest

from agentd_fleet import daemon
from agentd_fleet.join import publisher
from agentd_fleet.settings import load
from certificates import certificate


def gateway_tls(ca: Path) -> ssl.SSLContext | None:
    file = ca.with_name("fleet.toml")
    file.write_text(f'[fleet]\nca = "{ca}"\n')
    return daemon.tls_of(load(str(file), {}).fleet)


def publisher_tls(ca: Path) -> ssl.SSLContext | None:
    options = publisher.JoinOptions(
        "main", (), "", "", str(ca), None, None, "/run/agentd.sock", "", {}, 15, "/var/lib/agentd"
    )
    return publisher.tls_of(options)


def handshake(folder: Path, trusts: ssl.SSLContext | None) -> None:
    """Connect a client to a server, `etcd-1`, with the certificate in a folder."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert", folder / "key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    assert trusts is not None
    client = trusts.wrap_bio(to_client, to_server, server_hostname="etcd-1")
    for end in (client, server):
        with pytest.raises(ssl.SSLWantReadError):
            end.do_handshake()
    client.do_handshake()


@pytest.mark.parametrize("tls_of", [gateway_tls, publisher_tls])
def test_fleet_trusts_private_ca_without_key_usage(tmp_path: Path, tls_of) -> None:
    folders = [tmp_path / name for name in ("ca", "other", "server")]
    for folder in folders:
        folder.mkdir()
    (ca, key), (other, _) = certificate(folders[0]), certificate(folders[1])
    issued = ["-CA", str(ca), "-CAkey", str(key), "-addext", "subjectAltName=DNS:etcd-1"]
    certificate(folders[2], *issued, "-addext", "basicConstraints=critical,CA:FALSE")
    handshake(folders[2], tls_of(ca))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folders[2], tls_of(other))
