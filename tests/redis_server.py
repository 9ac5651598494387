"""A real Redis or Valkey server in a process of its own, or a skipped test where none is installed."""

import datetime
import ipaddress
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvshare.settings import SharedTierSettings, load_settings
from kvshare_lab.vllm.ports import free_ports

redis = pytest.importorskip("redis")

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="no redis-server is installed")
PASSWORD = "a password that no log may quote"


@dataclass(frozen=True)
class RedisServer:
    """A server that runs, with nothing on disk."""

    port: int
    process: subprocess.Popen[bytes]
    folder: Path
    options: tuple[str, ...] = ()
    is_tls: bool = False

    def client(self) -> Any:
        if self.is_tls:
            return redis.Redis(
                port=self.port, password=PASSWORD, ssl=True, ssl_ca_certs=str(self.folder / "ca.pem")
            )
        return redis.Redis(port=self.port, password=PASSWORD)

    def settings(self, **given: object) -> SharedTierSettings:
        """What a server of ours is told, with the password in a file."""
        file = self.folder / "password"
        file.write_text(PASSWORD + "\n")
        scheme = "rediss" if self.is_tls else "redis"
        url = f"{scheme}://localhost:{self.port}/0"
        own: dict[str, object] = {"url": url, "password_file": str(file), "timeout_s": 20.0}
        values = {**own, **given}
        if self.is_tls:
            values.setdefault("ca_file", str(self.folder / "ca.pem"))
        overrides = {f"shared_tier.{name}": value for name, value in values.items()}
        return load_settings(overrides=overrides).shared_tier

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def again(self) -> "RedisServer":
        """Another at the same port, which has nothing of the first."""
        started = replace(self, process=_start(self.port, self.folder, self.options))
        _wait_for(started)
        return started


@contextmanager
def redis_at(folder: Path, *options: str, tls: bool = False) -> Iterator[RedisServer]:
    (port,) = free_ports(1)
    if tls:
        _write_certificate(folder)
        options = (*options, "--port", "0", "--tls-port", str(port))
        options = (
            *options,
            "--tls-cert-file",
            str(folder / "ca.pem"),
            "--tls-key-file",
            str(folder / "key.pem"),
        )
        options = (*options, "--tls-ca-cert-file", str(folder / "ca.pem"), "--tls-auth-clients", "no")
    server = RedisServer(port, _start(port, folder, options), folder, options, tls)
    try:
        _wait_for(server)
        yield server
    finally:
        server.kill()


def _start(port: int, folder: Path, options: tuple[str, ...]) -> subprocess.Popen[bytes]:
    assert PROGRAM is not None
    own = ("--save", "", "--appendonly", "no", "--requirepass", PASSWORD, "--dir", str(folder))
    command = [PROGRAM, "--port", str(port), "--bind", "127.0.0.1", *own, *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for(server: RedisServer) -> None:
    until = time.monotonic() + 60
    while True:
        assert server.process.poll() is None, "the server has ended"
        try:
            server.client().ping()
        except redis.exceptions.ConnectionError:
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.05)
        else:
            return


def _write_certificate(folder: Path) -> None:
    """One that signs itself, for localhost."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "key.pem").write_bytes(private)
