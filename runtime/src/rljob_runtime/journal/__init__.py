"""What a killed driver had finished: scored groups and the batches made of them, so that a restart trains each once.

::

    scheduler, buffer ── GroupLog ──> JournalWriter ── a thread ──> JournalFiles ──> <run>/journal/000001-000001.journal, ...
                                                                                           │
    scheduler.restore <── Recovered <── recover (replay.py) <── fold (reading.py) <── frames of all files, in order

| record  | written when                                 | holds                                                           |
|---------|----------------------------------------------|-----------------------------------------------------------------|
| begin   | a file is begun                              | which run it belongs to, what of earlier files goes on          |
| group   | a scored group is put into the buffer        | its trajectories with all arrays, rewards, its prompt           |
| step    | the trainer takes a batch                    | the batch's groups, in order                                    |
| release | a group is dropped, filtered or cancelled    | its prompt, which stays done                                    |

What a file holds is always the beginning of what happened, whenever the process was killed; nothing is written twice and nothing is
changed later. A checkpoint begins a new file; files that the newest complete checkpoint does not need are removed. On a restart from
the checkpoint of step k the batches of the steps k, k+1, ... are trained from the same groups (replay), groups that no step took wait in
the buffer, and only what was running is asked again.

The journal saves work and is never needed to be right: what it lacks is asked again. Where it cannot be written, training goes on
without it and the next checkpoint tries again.
"""
