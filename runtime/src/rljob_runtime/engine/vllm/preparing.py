"""What a process can do for an engine before it has its devices: imports, and what vLLM keeps of configuration, model and tokenizer.

Each part is done by vLLM's own functions and its result dropped: what is left is imported modules and the caches of vLLM and transformers.
On accelerators it stops where vLLM's own front end does, which must not initialize CUDA because it forks: classes of workers and models may
do so when they are imported.
"""

from __future__ import annotations

from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.executor.abstract import Executor

import rljob_runtime.engine.vllm.loop  # noqa: F401 - what the engine's thread imports
from rljob_runtime.engine.expected_parameters import expected_parameters
from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.tokenizer import load_tokenizer
from rljob_runtime.engine.vllm import weight_receiver
from rljob_runtime.engine.vllm.engine_args import engine_args


def prepare(config: EngineConfig) -> None:
    """Do all of it; who calls it looks whether something of it has initialized CUDA all the same."""
    weight_receiver.register()
    made = engine_args(config).create_engine_config()
    Executor.get_class(made)
    made.scheduler_config.get_scheduler_cls()
    load_tokenizer(config)
    expected_parameters(config.model_path, config.trust_remote_code)
    if current_platform.is_cpu():
        resolve_obj_by_qualname(made.parallel_config.worker_cls)
        get_model_cls(made.model_config)
