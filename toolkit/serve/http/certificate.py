"""The certificate of a server over HTTPS, and its key."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.serve.options import ProxySettings, ServerSettings


def ssl_files(settings: ServerSettings | ProxySettings) -> tuple[str | None, str | None]:
    """(key, certificate) of a server over HTTPS, None where it is none. Raises UsageError for files that do not do."""
    certificate, key, asked = settings.ssl_certfile, settings.ssl_keyfile, "--ssl-certfile"
    if certificate is None and key is not None:
        raise UsageError("--ssl-keyfile: only with --ssl-certfile, the certificate that it belongs to; give that too")
    if certificate is None and settings.ssl:
        key, certificate, asked = _of_environment("SSL_KEYFILE"), _of_environment("SSL_CERTFILE"), "--ssl"
    if certificate is None:
        return None, None
    for path in filter(None, (certificate, key)):
        if not Path(path).is_file():  # a pipe cannot be read twice
            raise UsageError(f"{asked}: expected a certificate and its key in files, found {path}, which is none")
    try:  # now, before a model is loaded; a key with a password fails, where it would be asked for else
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:
        told = f"{certificate}" + (f" and {key}" if key is not None else "")
        text = f"{asked}: expected a certificate and its key, without a password, found {told} ({error})"
        raise UsageError(text) from error
    return None if key is None else str(key), str(certificate)


def _of_environment(name: str) -> Path:
    path = os.environ.get(name)
    if not path or not Path(path).is_file():
        raise UsageError(f"--ssl: expected the environment variable {name} to name a file, found {path or 'nothing'}")
    return Path(path)
