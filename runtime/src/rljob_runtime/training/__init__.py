"""The trainer: torch only, no Ray; one :class:`~rljob_runtime.training.worker.PolicyWorker` per process.

::

    TrainBatch -> microbatch.make_micro_batches -> step.accumulate_gradients -> optimizer -> weights.pack -> engines
                                                        |  model.token_logprobs (chunked head)  +  losses.*

``config`` holds settings and imports no torch. The same code runs on CPU (gloo) and CUDA (nccl), frozen or trainable.
"""
