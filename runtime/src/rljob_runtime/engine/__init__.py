"""Rollout engines: one protocol, vLLM behind it, and a scripted fake for tests of the driver.

``protocol`` says what every engine does, ``vllm/`` holds all that knows vLLM, ``fake`` is the in-memory engine of tests, ``residence`` what
both know about memory that is away. Nothing is imported here: the CLI must start without torch or vLLM.
"""
