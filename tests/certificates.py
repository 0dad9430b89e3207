"""Self-signed certificates for tests."""

import subprocess
from pathlib import Path

from needs import require


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
