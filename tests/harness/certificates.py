"""Certificates for one test: a CA, and certificates that it signs."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

_VALID = timedelta(days=2)


@dataclass(frozen=True)
class Certified:
    """PEM files of a certificate and its key; only their owner may read the key."""

    cert: Path
    key: Path


class Authority:
    """A CA with its files in `folder`. `cert`: its certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        built = _builder(self._name, self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.cert = folder / f"{name}.crt"
        self.cert.write_bytes(
            built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )

    def sign(self, name: str, *hosts: str, file: str | None = None) -> Certified:
        """Return a new certificate for the common name, and for these host names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        built = _builder(_named(name), self._name, key.public_key())
        if hosts:
            built = built.add_extension(
                x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
            )
        stem = file or name
        found = Certified(self._folder / f"{stem}.crt", self._folder / f"{stem}.key")
        signed = built.sign(self._key, hashes.SHA256())
        found.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        found.key.touch(mode=0o600)
        found.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return found


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
    )
