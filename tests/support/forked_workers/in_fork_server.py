"""Preloaded by a fork server of multiprocessing: servers of vLLM and SGLang that its processes start are forks, all of their processes."""

from tests.support import forked_workers

_servers = forked_workers.servers()
_servers.__enter__()
