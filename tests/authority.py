"""Certificates for tests of TLS."""

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Authority:
    """Signs certificates; `certificate` is the file that clients trust."""

    key: ec.EllipticCurvePrivateKey
    name: x509.Name
    certificate: Path

    @classmethod
    def make(cls, folder: Path, common_name: str) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        signed = (
            _certificate(name, name, key, signer=key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(SIGNS_CERTIFICATES, critical=True)
        )
        file = folder / f"{common_name}.crt"
        file.write_bytes(signed.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return cls(key, name, file)

    def issue(self, folder: Path, address: str) -> Path:
        """A certificate for an IP address and its key, in one file."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, address)])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        signed = _certificate(subject, self.name, key, signer=self.key).add_extension(names, critical=False)
        file = folder / f"{address}.pem"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + signed.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        return file


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    """With the identifiers of both keys, without which Python 3.13 trusts none."""
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(days=1),
        not_valid_after=now + timedelta(days=1),
    )
    ours = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    theirs = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return made.add_extension(ours, critical=False).add_extension(theirs, critical=False)


def shown_by_server(certificate: Path) -> ssl.SSLContext:
    """For a server that shows clients this certificate."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    return tls
