"""What this machine's GPU reaches, line by line, beside what it could reach: ``tools/gpu-check``.

::

    checks.py      the table: name, what it needs, how long it takes ── run one after another
      limits.py      the machine alone: matrix products, copies, files                  torch
      transports.py  between two processes: IPC handles, a collective (peers.py)        torch
      sync.py        weights through a job's transports (sync_ends.py)                  + transformers
      parallel.py    two trainer ranks compared with one (ranks.py)                     + transformers
      offload.py     state off the device and back                                      + rljob_runtime
      trainer.py     training step, log-probs, memory, checkpoint, probe                + transformers
      engine.py      vLLM: sleep, wake, probe against the trainer                       + vllm
      generating.py  vLLM with speculation, in fp8, scheduling ahead                    + vllm
    lines.py       a value beside its limit and its bound: PASS or FAIL
    report.py      each line shown and written as it comes, and what is under way
    ending.py      the end before all checks are done: the minutes are over, a signal
    terminal.py    progress bar and lines (rich where it is installed), JSON

A check whose libraries are missing is skipped, with their names. Without CUDA every check runs at CPU size (``scale.py``): the same code,
tiny sizes, and no bounds on speed.
"""
