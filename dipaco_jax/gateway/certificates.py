"""The certificate of the gateway: one that is given, or one that it signs itself on its first start, and keeps."""

import datetime
import hashlib
import os
import pathlib
import socket
import ssl

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import files

FOLDER = 'gateway'  # in the place of the run on this machine; only this user can read it
CERTIFICATE, KEY = 'certificate.pem', 'key.pem'
YEARS = 10  # workers compare the certificate itself, so nothing is gained by a shorter time


def make_folder(local: pathlib.Path) -> pathlib.Path:
  """Returns the gateway's private folder. Raises InputError if others can write into it."""
  folder = local / FOLDER
  files.make_private_folder(folder, '--workdir')
  return folder


def keep(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
  """Returns the files of the certificate and the key of this gateway, made on its first start."""
  certificate, key = folder / CERTIFICATE, folder / KEY
  if not (certificate.exists() and key.exists()):
    new_certificate, new_key = make_own()
    for file, data in ((key, new_key), (certificate, new_certificate)):
      file.unlink(missing_ok=True)
      with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'wb') as f:
        f.write(data)
  return certificate, key


def make_own() -> tuple[bytes, bytes]:
  """Returns a self-signed certificate and its key, in PEM. Raises InputError if `cryptography` is not installed."""
  try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
  except ImportError as e:
    fix = 'pip install "dipaco_jax[gateway]", or give --cert and --key'
    raise InputError(f'{e.name} is missing, which makes the certificate of the gateway: {fix}') from e
  key = ec.generate_private_key(ec.SECP256R1())
  name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, 'dipaco_jax gateway')])
  now = datetime.datetime.now(datetime.UTC)
  builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
  builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
  builder = builder.not_valid_after(now + datetime.timedelta(days=365 * YEARS))
  names = [x509.DNSName(host) for host in sorted({'localhost', socket.gethostname()}) if host.isascii()]
  builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
  certificate = builder.sign(key, hashes.SHA256())
  pem = serialization.Encoding.PEM
  plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
  return certificate.public_bytes(pem), key.private_bytes(pem, *plain)


def fingerprint(certificate: pathlib.Path) -> str:
  """Returns the sha256 of the first certificate in a PEM file. Raises InputError if there is none."""
  try:
    text = certificate.read_text()
    end = '-----END CERTIFICATE-----'
    der = ssl.PEM_cert_to_DER_cert(text[text.index('-----BEGIN CERTIFICATE') : text.index(end) + len(end)])
  except (OSError, ValueError) as e:
    raise InputError(f'--cert={certificate}: there is no certificate in PEM ({e})') from e
  return hashlib.sha256(der).hexdigest()


def check(certificate: pathlib.Path, key: pathlib.Path):
  """Raises InputError if a certificate and a key do not belong together, or cannot be read."""
  try:
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
  except (OSError, ssl.SSLError) as e:
    raise InputError(f'--cert={certificate} --key={key}: {getattr(e, "strerror", None) or e}') from e
