"""What tests need of the kernel that a machine may not have: without it, they cannot run there at all."""

import pytest

from rljob_runtime.sandbox import landlock

needs_landlock = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")
needs_tcp_rules = pytest.mark.skipif(landlock.abi() < landlock.TCP_ABI, reason="this kernel cannot limit TCP")
