"""Rollout and training side by side: admission, scheduling, buffering, batching. Plain asyncio over protocols.

::

    PromptSource -> RolloutScheduler -> EngineFleet -> engines -> reward workers -> TrajectoryBuffer -> batching -> trainer
                          ^             (routing)                                                                      |
                          +------------------------- StalenessGate.advance(version) <-- publisher <--------------------+

| part             | consumes            | produces          | waits for                | unblocked by            |
|------------------|---------------------|-------------------|--------------------------|-------------------------|
| admission        | prompts             | requests          | room under the gate      | a new version, a drop   |
| fleet            | requests            | completions       | room at an engine        | a finished response     |
| gathering        | completions         | groups            | all samples of a group   | the last of them        |
| judging          | groups              | judged groups     | reward workers           | their answer            |
| trainer loop     | B judged groups     | a new version     | TrajectoryBuffer.take(B) | the B-th, no older left |

Synchronous training is the same loop with a staleness of 0. Nothing here imports ray or torch.
"""
