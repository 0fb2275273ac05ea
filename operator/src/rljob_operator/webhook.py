"""The validating webhook: an HTTPS server that every operator runs, and the certificates that they share.

::

    Secret (certificates) <--made and renewed by the leader--> every operator serves with it
         `--caBundle--> ValidatingWebhookConfiguration, written by the leader --> the API server trusts it

It only ever helps: failurePolicy is Ignore, so that with no operator, a certificate that is not there yet or too many requests at once, an
RLJob is stored unchecked, and condition Accepted says the same a moment later.

kopf's own admission server was not taken: it makes a certificate per process and writes its own into the configuration, so that two
replicas overwrite each other; it answers for handlers per object; and its configuration may outlive it without failing open.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from rljob_operator import certificates, review
from rljob_operator.certificates import Certificates
from rljob_operator.errors import AlreadyExistsError, KubeError, NotFoundError
from rljob_operator.metrics import Metrics
from rljob_operator.model import Manifest
from rljob_operator.protocol import Kind, KubeClient

PATH: Final = "/validate"
PERIOD_S: Final = 60.0
"""Time between two looks at the Secret: how long a replica may serve the previous certificate."""
RETRY_S: Final = 2.0
"""The same before the first certificate, and after an error."""
NUM_AT_ONCE: Final = 16
"""Requests that are waited for; more are answered at once, unchecked."""
MAX_REQUEST_BYTES: Final = 4 * 2**20
"""Size of the largest request: old and new object of at most 1.5 MB each."""
_FILES: Final = {"authorities": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}
"""Field of Certificates -> key of the Secret."""

logger = logging.getLogger(__name__)


class Webhook:
    """Server and certificates of one operator."""

    def __init__(
        self,
        client: KubeClient,
        metrics: Metrics,
        *,
        service: str,
        port: int,
        may_write: Callable[[], bool],
        known: review.Known = review.everything,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """``service`` is "namespace/name" of Service and Secret; the configuration is called ``<namespace>-<name>``."""
        self._client = client
        self._metrics = metrics
        self._namespace, _, self._name = service.partition("/")
        self._port = port
        self._may_write = may_write
        self._known = known
        self._clock = clock
        # Loopback for a look by hand through a port-forward.
        self._hosts = (f"{self._name}.{self._namespace}.svc", "localhost", "127.0.0.1")
        self._served: Certificates | None = None
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._slots = asyncio.Semaphore(1)
        self._num_waiting = 0
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post(PATH, self.handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)

    async def run(self) -> None:
        """Serve as soon as there is a certificate, and keep it current, until cancelled."""
        await self._runner.setup()
        try:
            while True:
                is_done = await self.step()
                if self._served is not None and not self._runner.addresses:
                    await web.TCPSite(self._runner, port=self._port, ssl_context=self._tls).start()
                    logger.info("the webhook listens on port %d", self._port)
                await asyncio.sleep(PERIOD_S if is_done else RETRY_S)
        finally:
            await self._runner.cleanup()

    async def step(self) -> bool:
        """Read the certificates, or make them; returns False to be called again soon."""
        try:
            current = await self._read()
            if self._may_write():
                if current is None or certificates.is_due(current, self._hosts, self._clock()):
                    current = await self._renew(current)
                await self._publish(current)
        except KubeError as error:
            logger.warning("the webhook's certificates: %s; trying again in %g s", error, RETRY_S)
            return False
        if current is not None and current != self._served:
            self._load(current)
        return self._served is not None

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one AdmissionReview."""
        try:
            asked = json.loads(await request.read())
            uid = asked["request"]["uid"]
            if self._num_waiting >= NUM_AT_ONCE:
                self._metrics.reviews.labels("unchecked").inc()
                answer = {"uid": uid, "allowed": True, "warnings": ["not checked yet: too many requests at once; see condition Accepted"]}
            else:
                answer = await self._answer(asked["request"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._metrics.reviews.labels("malformed").inc()
            raise web.HTTPBadRequest(text=f"not an AdmissionReview of an RLJob: {error!r}") from error
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer})

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check in a thread, one at a time: a large spec takes a while, and reconciles go on meanwhile."""
        self._num_waiting += 1
        try:
            async with self._slots:
                answer = await asyncio.to_thread(review.review, request, self._known)
        finally:
            self._num_waiting -= 1
        self._metrics.reviews.labels("allowed" if answer["allowed"] else "denied").inc()
        return answer

    # --- certificates --------------------------------------------------------------------------------------------------------------

    async def _read(self) -> Certificates | None:
        """The certificates in the Secret; a field that is absent or malformed is empty, which makes them due."""
        try:
            secret = await self._client.get(Kind.SECRET, self._namespace, self._name)
        except NotFoundError:
            return None
        data = secret.get("data") or {}
        return Certificates(**{field: _decoded(data.get(key, "")) for field, key in _FILES.items()})

    async def _renew(self, former: Certificates | None) -> Certificates:
        """Make new certificates and store them."""
        made = certificates.make(self._hosts, self._clock(), former)
        data = {key: base64.b64encode(getattr(made, field)).decode() for field, key in _FILES.items()}
        metadata = {"namespace": self._namespace, "name": self._name}
        secret = {"apiVersion": Kind.SECRET.api_version, "kind": str(Kind.SECRET), "metadata": metadata, "type": "kubernetes.io/tls"}
        try:
            if former is None:
                await self._client.create({**secret, "data": data})
            else:
                await self._client.patch_merge(Kind.SECRET, self._namespace, self._name, {"data": data})
        except AlreadyExistsError:
            stored = await self._read()
            if stored is not None:
                return stored
            raise
        logger.info("made a certificate for the webhook, valid until %s", self._clock() + certificates.VALIDITY)
        return made

    async def _publish(self, current: Certificates) -> None:
        """Tell the API server what to trust."""
        name = f"{self._namespace}-{self._name}"
        stored = await self._client.get(Kind.WEBHOOK_CONFIGURATION, "", name)
        bundle = base64.b64encode(current.authorities).decode()
        hooks = [{**hook, "clientConfig": {**hook["clientConfig"], "caBundle": bundle}} for hook in stored.get("webhooks") or ()]
        if hooks != stored.get("webhooks"):
            change: Manifest = {"metadata": {"resourceVersion": stored["metadata"]["resourceVersion"]}, "webhooks": hooks}
            await self._client.patch_merge(Kind.WEBHOOK_CONFIGURATION, "", name, change)

    def _load(self, current: Certificates) -> None:
        """Serve new connections with these certificates."""
        with tempfile.TemporaryDirectory(prefix="rljob-webhook-") as folder:  # readable by this user alone
            certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
            certificate.write_bytes(current.certificate)
            key.write_bytes(current.key)
            try:
                self._tls.load_cert_chain(certificate, key)
            except ssl.SSLError as error:
                logger.warning("Secret %s/%s has no usable certificate: %s; the leader renews it", self._namespace, self._name, error)
                return
        self._served = current


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""
