"""Certificates for tests: an authority, and what it issues."""

import datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def name_of(common_name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def pem_of(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Pair(NamedTuple):
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes

    def server_settings(self, directory):
        (directory / "server.pem").write_bytes(self.certificate)
        (directory / "server.key").write_bytes(self.key)
        return {
            "tcp_address": "localhost:0",
            "tls_certificate": directory / "server.pem",
            "tls_key": directory / "server.key",
        }


class Authority:
    def __init__(self, name):
        self._name = name_of(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = self._build(self._name, self._key.public_key(), x509.BasicConstraints(ca=True, path_length=0))
        self.certificate = own.public_bytes(serialization.Encoding.PEM)

    def issue(self, common_name):
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._build(name_of(common_name), key.public_key(), x509.BasicConstraints(ca=False, path_length=None))
        return Pair(made.public_bytes(serialization.Encoding.PEM), pem_of(key))

    def _build(self, subject, public_key, constraints):
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(constraints, critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())
