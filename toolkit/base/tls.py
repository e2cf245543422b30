"""How this program's clients check the certificate of a server, and what they say where they do not trust it."""

from __future__ import annotations

import ssl

HINT = "name a file that holds its certificate in the environment variable SSL_CERT_FILE"


def checking(insecure: bool = False) -> ssl.SSLContext:
    """Trusts whom the system trusts, or those in the file that SSL_CERT_FILE names; ``insecure``: everybody."""
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def alone(certificate: str) -> ssl.SSLContext:
    """Trusts the server that has this certificate, wherever it is."""
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN  # also where another vouches for it who is not in the file
    context.check_hostname = False
    return context


def why(error: BaseException | str) -> str:
    """What went wrong, and what to do where it is the certificate."""
    told = " ".join(str(error).split())
    return f"{told}; {HINT}" if "CERTIFICATE_VERIFY_FAILED" in told else told
