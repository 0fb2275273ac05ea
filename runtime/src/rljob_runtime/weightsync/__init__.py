"""Moving weights from the trainer to the engines, verified.

``publisher`` publishes versions over a ``transport``; ``transports`` has one file for each; ``packing`` lays tensors out in byte buckets,
``assembly`` collects them in an engine. Nothing is imported here, so that the driver can use the layout without torch or vLLM.
"""
