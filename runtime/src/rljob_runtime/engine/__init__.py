"""Rollout engines: one protocol, vLLM behind it, and a scripted fake for tests of the driver.

``protocol`` says what every engine does, ``environment`` what must be set before vLLM is imported, ``vllm_engine`` is the real one
(its thread runs ``vllm_loop``, which frees memory through ``vllm_memory``), ``fake`` the in-memory one, ``residence`` what both know about
memory that is away. Nothing is imported here: the CLI must start without torch or vLLM.
"""
