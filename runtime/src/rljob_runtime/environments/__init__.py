"""Environments of agentic jobs: the protocol that users write theirs against, built-in ones, and the worker that runs episodes.

::

    driver ── messages ──> EnvironmentWorker ── Task (built-in, at once) or Crew (a user's class, in processes)
                                └── Episode, Codec: limits, token ids
"""
