"""Judges: language models that score responses.

::

    RewardWorker ── questions ──> JudgeDesk (thread) ── JudgeClient ── HTTP ──> endpoint
         └── judgements ──> RewardPool ──> scoring process: words.load_reader ──> score

The desk holds network and key and runs no foreign code; what the judge wrote is read in a sandboxed process, which holds neither.
"""
