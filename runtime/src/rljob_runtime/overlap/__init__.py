"""Rollout and training side by side: admission, scheduling, buffering, batching. Plain asyncio over protocols.

::

    PromptSource -> RolloutScheduler -> EngineFleet -> engines -> reward workers -> TrajectoryBuffer -> batching -> trainer
                          ^      (waiting, routing)               (filters)                                            |
                          +------------------------- StalenessGate.advance(version) <-- publisher <--------------------+

| part             | consumes            | produces          | waits for                | unblocked by            |
|------------------|---------------------|-------------------|--------------------------|-------------------------|
| admission        | prompts             | requests          | room under the gate      | a new version, a group  |
|                  |                     |                   |                          | dropped or filtered     |
| fleet            | requests            | completions       | room at an engine        | a finished response     |
| gathering        | completions         | groups            | n samples of a group     | the n-th; others are    |
|                  |                     |                   |                          | cancelled (redundancy)  |
| scoring          | groups              | scored groups     | reward workers           | their answer            |
| trainer loop     | B scored groups     | a new version     | TrajectoryBuffer.take(B) | the B-th, no older left |

Every admitted group ends once: trained, dropped (too few rewards, too old in the buffer), filtered (nothing to learn from), or cancelled
(too old while it was still being generated); all but the first make room for the next prompt. Too many in a
row that are dropped for want of rewards end the run (``failing``). The fleet serves other owners too, such as validation.

Synchronous training is the same loop with a staleness of 0. Nothing here imports ray or torch.
"""
