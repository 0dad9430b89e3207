"""Self-signed certificates for tests."""

import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from support.needs import require


def certificate(folder: Path, *options: str) -> tuple[Path, Path]:
    """Return the files of a certificate and its key, made by openssl."""
    require("openssl")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
    command += ["ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x"]
    cert, key = folder / "cert", folder / "key"
    command += ["-out", str(cert), "-keyout", str(key), *options]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return cert, key


def certificate_that_ends(folder: Path, days: float) -> tuple[Path, Path]:
    """Return the files of a certificate of loopback that ends in some days, or has, and its key."""
    cert, key = certificate(folder)
    secret = load_pem_private_key(key.read_bytes(), None)
    name, now = x509.Name([]), datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=90))
    builder = builder.not_valid_after(now + timedelta(days=days))
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    builder = builder.add_extension(names, critical=False)
    cert.write_bytes(builder.sign(secret, hashes.SHA256()).public_bytes(Encoding.PEM))
    return cert, key


def certificate_of_version_2(cert: Path) -> None:
    """Make a certificate one of version 2, which OpenSSL uses and `cryptography` refuses."""
    der, version = ssl.PEM_cert_to_DER_cert(cert.read_text()), bytes.fromhex("a0030201")
    cert.write_text(ssl.DER_cert_to_PEM_cert(der.replace(version + b"\2", version + b"\1", 1)))
