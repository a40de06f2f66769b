"""HTTPS: with a certificate of our own, and with clients that must show one."""

from __future__ import annotations

import http.client
import ssl
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(which("openssl") is None, reason="no openssl to make a certificate")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(certificate, key) for 127.0.0.1, signed by itself."""
    where = tmp_path_factory.mktemp("tls")
    cert, key = where / "cert.pem", where / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return str(cert), str(key)


def status(server: Any, context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection(server.client.host.removeprefix("https://"), server.client.port, timeout=10, context=context)
    connection.request("GET", "/health")
    return connection.getresponse().status


def test_a_certificate_of_the_servers(start_server: Any, pair: tuple[str, str]) -> None:
    server = start_server(ssl_certfile=pair[0], ssl_keyfile=pair[1])
    assert server.url.startswith("https://")
    assert status(server, ssl.create_default_context(cafile=pair[0])) == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        status(server, ssl.create_default_context())


def test_clients_must_show_a_certificate_where_asked(start_server: Any, pair: tuple[str, str]) -> None:
    server = start_server(ssl_certfile=pair[0], ssl_keyfile=pair[1], ssl_ca_certs=pair[0])
    without = ssl.create_default_context(cafile=pair[0])
    with pytest.raises((ssl.SSLError, http.client.RemoteDisconnected, ConnectionError)):
        status(server, without)
    shown = ssl.create_default_context(cafile=pair[0])
    shown.load_cert_chain(Path(pair[0]), Path(pair[1]))
    assert status(server, shown) == 200
