"""``python -m rljob_runtime.engine.vllm.serve OPTIONS``: vLLM's OpenAI-compatible server, started with fewer imports than by vLLM itself.

The engine's process of that server is spawned, and Python imports the main module there again before anything else: of vLLM's own module
that is the whole HTTP server, of this one nothing.
"""

from __future__ import annotations


def main() -> None:
    """Until the server is stopped; options are those of ``vllm serve``, the model as ``--model``."""
    from rljob_api import collector

    with collector.paused():  # a fifth to a quarter of what the imports compute
        from vllm.entrypoints.launchers.api_server.entry import main as serve_until_stopped
        from vllm.v1.engine import async_llm  # noqa: F401  # imported later, with the collector running
    serve_until_stopped()


if __name__ == "__main__":
    main()
