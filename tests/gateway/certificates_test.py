"""The gateway's certificate: made once, private, and named by its fingerprint."""

import hashlib
import ssl

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.gateway import certificates


def test_a_certificate_is_made_once_and_is_private(tmp_path):
  folder = certificates.make_folder(tmp_path)
  certificate, key = certificates.keep(folder)
  before = certificate.read_bytes(), key.read_bytes()
  assert certificates.keep(folder) == (certificate, key) and before == (certificate.read_bytes(), key.read_bytes())
  assert key.stat().st_mode & 0o077 == 0 and folder.stat().st_mode & 0o077 == 0
  certificates.check(certificate, key)
  der = ssl.PEM_cert_to_DER_cert(certificate.read_text())
  assert certificates.fingerprint(certificate) == hashlib.sha256(der).hexdigest()


def test_a_certificate_and_the_key_of_another_are_rejected(tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  certificate, _ = certificates.keep(tmp_path / 'a')
  _, key = certificates.keep(tmp_path / 'b')
  with pytest.raises(InputError, match='--cert='):
    certificates.check(certificate, key)
  with pytest.raises(InputError, match='no certificate'):
    certificates.fingerprint(key)
