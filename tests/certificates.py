"""Certificates for tests: a CA of their own, and what it issues, as PEM files."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme

from penstock.rollout.server import TlsConfig

YESTERDAY = datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)


@dataclass
class Papers:
    """One CA's certificates as files."""

    folder: Path
    ca: trustme.CA
    ca_file: str

    @classmethod
    def of(cls, folder: Path) -> Papers:
        folder.mkdir()
        ca = trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca.pem")
        return cls(folder, ca, str(folder / "ca.pem"))

    def issue(self, name: str, *hosts: str, unit: str = "", expired: bool = False) -> tuple[str, str]:
        """Paths of certificate and key, with `name` as the common name."""
        stem = name.replace("/", "-")
        issued = self.ca.issue_cert(
            *(hosts or ("someone@example.org",)),
            common_name=name,
            organization_unit_name=unit or None,
            not_before=YESTERDAY - datetime.timedelta(days=1) if expired else None,
            not_after=YESTERDAY if expired else None,
        )
        cert, key = self.folder / f"{stem}.pem", self.folder / f"{stem}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return str(cert), str(key)

    def server(self, client_ca: bool) -> TlsConfig:
        cert, key = self.issue("trainer.example", "127.0.0.1", "localhost")
        return TlsConfig(cert, key, self.ca_file if client_ca else "")
