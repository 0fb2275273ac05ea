"""How long to wait, on a machine that may be slow or busy with other tests."""

from __future__ import annotations

HANG_S = 180.0
"""Bound of a wait for something that comes soon or never: a wait that ends well costs nothing, so this says nothing of speed."""
