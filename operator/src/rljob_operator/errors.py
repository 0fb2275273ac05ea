"""All errors that the operator raises, as one picklable hierarchy.

::

    OperatorError              (RuntimeError)
    ├── SettingsError                          the operator's own configuration is wrong -> it does not start
    └── KubeError                              the API server answered with an error, or not at all
        ├── NotFoundError                      404: the object is gone
        ├── AlreadyExistsError                 409 on create: an object of that name is there
        ├── ConflictError                      409 on update: a concurrent write -> reconcile again
        ├── RejectedError                      400, 403, 422: the request itself is rejected -> report it to the user
        ├── UnavailableError                   429, 5xx, no connection -> retry later
        │   └── UnansweredError                no answer in time
        └── NotLeaderError                     not sent: another operator may be the leader by now
"""

from __future__ import annotations


class OperatorError(RuntimeError):
    """Base class of all errors."""


class SettingsError(OperatorError):
    """Raised when an environment variable of the operator is missing or malformed."""


class KubeError(OperatorError):
    """Raised when the API server answers with an error, or not at all."""

    def __init__(self, action: str, status: int, message: str) -> None:
        """Keep the action and the answer; plain values, so that the error pickles."""
        super().__init__(action, status, message)
        self.action = action
        self.status = status
        self.message = message

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.action}: {self.status} {self.message}"


class NotFoundError(KubeError):
    """Raised for 404."""


class AlreadyExistsError(KubeError):
    """Raised for 409 with reason AlreadyExists."""


class ConflictError(KubeError):
    """Raised for any other 409."""


class RejectedError(KubeError):
    """Raised for 400, 403 and 422."""


class NotLeaderError(KubeError):
    """Raised instead of sending a write when this process does not hold the lease, or not surely any more."""


class UnavailableError(KubeError):
    """Raised for 429, 5xx or a lost connection."""

    def __init__(self, action: str, status: int, message: str, retry_after_s: float | None = None) -> None:
        """Also keep the server's Retry-After."""
        super().__init__(action, status, message)
        self.args = (action, status, message, retry_after_s)
        self.retry_after_s = retry_after_s


class UnansweredError(UnavailableError):
    """Raised when a connected API server does not answer in time, for example because it waits for a webhook."""
