"""Moving weights from the trainer to the engines: packed buckets, the engine-side receiver, verification.

``packing`` lays tensors out in byte buckets, ``receiver`` is the vLLM worker's end of an update. Nothing is imported here, so that
the driver can use the layout without torch or vLLM.
"""
