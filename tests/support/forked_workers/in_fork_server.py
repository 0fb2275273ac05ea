"""Preloaded by a fork server of multiprocessing: servers of vLLM and SGLang that its processes start are forks, all of their processes."""

import contextlib

from tests.support import forked_workers

_lasting = contextlib.ExitStack()
_lasting.enter_context(forked_workers.servers())
