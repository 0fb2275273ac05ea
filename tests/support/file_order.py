"""Which files of tests run first, by one process, or by several; see ``tests/conftest.py``."""

WITH_API_SERVER = (
    "test_operator_faults.py",
    "test_operator_lifecycle.py",
    "test_operator_replicas.py",
    "test_chaos.py",
    "test_api_server.py",
    "test_spec_fuzz.py",
    "test_progress_account.py",
    "test_operator_webhook.py",
)
"""Files of one API server, which computes 10 s before it serves: run by one process, beginning with those that mostly wait."""
WITH_VLLM = (
    "test_vllm_engine.py",
    "test_engine_offload.py",
    "test_patched_updates.py",
    "test_sampling_mask.py",
    "test_router_replay.py",
    "test_mixture_engine.py",
    "test_served_adapters.py",
)
"""Files of vLLM in the process of the test, whose imports compute 6 s: by one process as well."""
TOGETHER = {name: files[0] for files in (WITH_API_SERVER, WITH_VLLM) for name in files}
"""The file by which those are called that one process runs."""
SPREAD = (
    "test_quickstart.py",
    "test_converted_job.py",
    "test_engine_replacement.py",
    "test_run.py",
    "test_judged_run.py",
    "test_examples_run.py",
)
"""Files whose tests take minutes and share no fixture of the module: each test is begun by whichever process is free."""
LONGEST_FIRST = (
    *WITH_API_SERVER,
    *SPREAD,
    "test_lake_model.py",
    "test_time_division.py",
    "test_domains.py",
    "test_episodes_run.py",
    "test_restarted_workers.py",
    "test_server_offload.py",
    "test_incluster.py",
    "test_sglang_engine.py",
    *WITH_VLLM,
    "test_overlap_run.py",
    "test_layer_compilation.py",
    "test_tensor_parallel_classes.py",
    "test_gpu_check.py",
    "test_sync_faults.py",
    "test_convert.py",
    "test_bit_equality.py",
)
"""Files, and files together, of a minute and more: begun last, one of them would run alone at the end."""
