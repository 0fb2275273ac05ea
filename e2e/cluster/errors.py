"""What goes wrong with a test cluster."""


class ClusterError(Exception):
    """Raised when a cluster cannot be built, started, reached or stopped; the message says what, where and the remedy."""


class CommandError(ClusterError):
    """Raised when a command that was run to its end failed; the message holds the command and what it printed."""


class ContextRefusedError(ClusterError):
    """Raised when the current kubectl context is not one that tests may change things in."""
