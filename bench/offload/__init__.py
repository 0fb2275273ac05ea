"""Switch times of offload against the copy limit of the machine, ``model.to("cpu")`` and FSDP2's CPUOffloadPolicy.

Needs torch and this repository, nothing else of it running: ``PYTHONPATH=crds/src:runtime/src python -m bench.offload --device cuda``
works beside any PyTorch. Everything is measured in one process, one after the other; of every figure the median of ``--repeat`` runs
counts. Unattended, in under 8 minutes; writes a JSON file and a markdown file beside it.
"""
