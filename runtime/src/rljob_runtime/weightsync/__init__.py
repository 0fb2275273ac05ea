"""Moving weights from the trainer to the engines, verified.

::

    driver         publisher ──> transport (protocol), transports/ (one file each)     meetings: groups of TCP and NCCL
    trainer rank   sending ──> packing, shares (who sends what) ──> encoding: delta, device_delta, staged_delta ──> parcel (checksum)
    on the way     shared_memory, staging (CUDA)    or    outbox, group, store, chain, node_shares    or    Ray's object store
    engine         assembly (collects buckets), copies ──> patching (writes changes), or vLLM's loader ──> probe

``changes`` is the format of sparse buckets, which the three encoders make in host memory, on a device, and from one to the other.
``checkpoint_names`` and ``adapters`` are what a sync sends, ``holdings`` what an engine frees when another transport takes over. Nothing is
imported here, so that the driver can use the layout without torch or vLLM.
"""
