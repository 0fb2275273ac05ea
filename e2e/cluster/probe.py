"""Asks local health endpoints; for :func:`e2e.cluster.process.wait_ready`."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request

from e2e.cluster.pki import Identity, Pki
from e2e.cluster.wait import Check

_TIMEOUT_S = 5.0
_BODY_CHARACTERS = 400


def http_ok(url: str, *, pki: Pki | None = None, identity: Identity | None = None) -> Check:
    """A check that ``url`` answers 200.

    Args:
        url: http or https.
        pki: the authority the server's certificate has to come from; without it any certificate will do (loopback only).
        identity: who to be; nobody when None.
    """
    context = ssl.create_default_context(cafile=str(pki.ca)) if pki else _any_certificate()
    if pki and identity:
        context.load_cert_chain(pki.certificate(identity), pki.key(identity))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))

    def check() -> str | None:
        try:
            with opener.open(url, timeout=_TIMEOUT_S) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            body = error.read().decode(errors="replace")
            failed = [line for line in body.splitlines() if line.startswith("[-]")]
            return f"{url} answers {error.code}: {' '.join(failed) or body[:_BODY_CHARACTERS]}"
        except (OSError, http.client.HTTPException) as error:
            return f"{url}: {error}"
        return None

    return check


def _any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
