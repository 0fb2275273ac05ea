"""The trainer: torch only, no Ray; one worker per process, of a policy (:mod:`.worker`) or of a critic (:mod:`.critic`).

::

    TrainBatch -> microbatch.make_micro_batches -> step.accumulate_gradients -> optimizer -> weights.pack -> engines
                                                        |  model.token_logprobs (chunked head)  +  losses.*

Ranks form their group in ``meeting``. In a mixture of experts, ``mixtures`` finds the experts of a layer and ``routers`` their routers;
``router_bias`` moves correction biases after ``optimizer``. ``checkpoint`` saves and restores state, through ``checkpoint_writing`` and
``checkpoint_reading``. ``config`` holds settings and imports no torch. The same code runs on CPU
(gloo) and CUDA (nccl), frozen or trainable.
"""
