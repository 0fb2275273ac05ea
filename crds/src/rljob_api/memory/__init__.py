"""How much memory a job needs on every device, in every phase, before a device is taken.

::

    config.json ── shape_from_config ─┐
    parameterCount ── shape_from_count ┴─> ModelShape ─┐
    spec, plan ────────────────────────────────────────┴─ estimate ─> MemoryEstimate ─> problems, warnings, as_text, as_document

Terms are those of this project's own trainer and of vLLM and SGLang; docs of the modules ``training_needs`` and ``engine_needs`` say
where each comes from. An estimate leaves out fragmentation, so that what is above nine tenths of a limit is a warning. Pure; time grows
with processes and their devices, text with distinct situations.
"""

from rljob_api.memory.checks import problems, problems_of, tight, warnings
from rljob_api.memory.estimating import chosen_reduction, estimate, process_needs
from rljob_api.memory.known_shapes import Served, ShapeReader, declared, served_shapes, shape_of
from rljob_api.memory.model import Kind, KVCapacity, MemoryEstimate, Need, Phase, PhaseEstimate, PoolEstimate, PoolKind, Term
from rljob_api.memory.rendering import as_document, as_rows, as_text, peak_rows
from rljob_api.memory.shape import DecoderShape, ModelShape, shape_from_config, shape_from_count
from rljob_api.memory.usual_shape import usual_shape

__all__ = [
    "DecoderShape",
    "KVCapacity",
    "Kind",
    "MemoryEstimate",
    "ModelShape",
    "Need",
    "Phase",
    "PhaseEstimate",
    "PoolEstimate",
    "PoolKind",
    "Served",
    "ShapeReader",
    "Term",
    "as_document",
    "as_rows",
    "as_text",
    "chosen_reduction",
    "declared",
    "estimate",
    "peak_rows",
    "problems",
    "problems_of",
    "process_needs",
    "served_shapes",
    "shape_from_config",
    "shape_from_count",
    "shape_of",
    "tight",
    "usual_shape",
    "warnings",
]
