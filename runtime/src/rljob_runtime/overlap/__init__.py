"""Rollout and training side by side: admission, scheduling, buffering, batching. Plain asyncio over protocols.

::

    PromptSource -> RolloutScheduler -> engines -> reward workers -> TrajectoryBuffer -> batching -> trainer
          ^               ^                                                                           |
          |               +------------------- StalenessGate.advance(version) <-- publisher <---------+

| part             | consumes            | produces          | waits for                | unblocked by            |
|------------------|---------------------|-------------------|--------------------------|-------------------------|
| admission        | prompts             | requests          | room under the gate      | a new version, a drop   |
| collection       | completions         | groups            | engines                  | a finished response     |
| judging          | groups              | judged groups     | reward workers           | their answer            |
| trainer loop     | B judged groups     | a new version     | TrajectoryBuffer.take(B) | the B-th judged group   |

Synchronous training is the same loop with a staleness of 0. Nothing here imports ray or torch.
"""
