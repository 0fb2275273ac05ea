"""Small tokenizers with chat templates of the kinds that models have; written for the tests, after the shape of the models' own."""

from functools import cache

from transformers import PreTrainedTokenizerBase

from rljob_runtime.tiny.tokenizer import build_tokenizer

_TEXTS = ["Turn 1: Observation: first question You're a helpful assistant. <answer>Right</answer> <answer> Up </answer>", "P_OG\n____"]

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
"""Qwen2.5: append-only, with a line feed behind the close token."""

TRIMMING = """\
{{- '<|begin|>' -}}
{%- for message in messages -%}
{{- '<|start_header|>' + message['role'] + '<|end_header|>\n\n' + message['content'] | trim + '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header|>assistant<|end_header|>\n\n' -}}{%- endif -%}"""
"""Llama 3: takes white space around a message away."""

REASONING = """\
{%- set last = namespace(user=0) -%}
{%- for message in messages -%}{%- if message['role'] == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if message['role'] == 'assistant' and '</think>' in content and loop.index0 < last.user -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""
"""Qwen3: takes reasoning away once the user speaks again, and writes an empty block of it where thinking is off."""

ROLE_STOPS = """\
{{- '[gMASK]' -}}
{%- for message in messages -%}{{- '<|' + message['role'] + '|>\n' + message['content'] -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"""
"""GLM: no close token, the next role's token ends a response."""

SPACED = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}{{- ' ' + message['content'] + ' </s>' -}}
{%- else -%}{{- '<s>[INST] ' + message['content'] + ' [/INST]' -}}{%- endif -%}
{%- endfor -%}"""
"""Llama 2: a space in front of the close token."""

TOOLS = """\
{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] + '\n\n' -}}{%- endif -%}
{{- 'Functions:\n' -}}{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- 'Call them as\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- if messages[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message['content'] + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif not (tools and loop.first and message['role'] == 'system') -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
"""Qwen 2.5 and 3: tools in the system message, results of the same turn within one message of the user."""

NO_TOOLS = """\
{%- for message in messages -%}
{%- if message['role'] not in ('system', 'user', 'assistant') -%}{{- raise_exception('unknown role') -}}{%- endif -%}
{%- if message['role'] == messages[loop.index0 - 1]['role'] and loop.index0 -%}{{- raise_exception('twice') -}}{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
"""Knows no tools, and wants roles to take turns."""

NO_SYSTEM = """\
{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}{{- '<start>' + message['role'] + '\n' + message['content'] + '<end>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start>model\n' -}}{%- endif -%}"""
"""Gemma 2: refuses system messages."""

FORGETFUL = """\
{{- '<|im_start|>user\n' + messages[-1]['content'] + '<|im_end|>\n<|im_start|>assistant\n' -}}
{%- if messages | length == 3 -%}{{- messages[1]['content'] + '<|im_end|>\n<|im_start|>user\n' + messages[2]['content'] -}}{%- endif -%}"""
"""Made for questions without history: shows no more than the last message, or three."""

TOOL_CALLS = """\
{%- if tools -%}
{{- '<|im_start|>system\n' -}}{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
"""Qwen2.5 with tools: their JSON in front, calls written again from their parts."""

TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "reasoning": REASONING, "role-stops": ROLE_STOPS, "spaced": SPACED}
TEMPLATES |= {"tools": TOOLS, "tool-calls": TOOL_CALLS, "no-tools": NO_TOOLS, "no-system": NO_SYSTEM, "forgetful": FORGETFUL}
_SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>", "[gMASK]", "<|system|>", "<|user|>",
    "<|assistant|>", "<s>", "</s>",
]  # fmt: skip


@cache
def chat_tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """The tokenizer with one of ``TEMPLATES``, or none (``plain``); shared, not to be changed."""
    tokenizer = build_tokenizer(_TEXTS)
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.chat_template = TEMPLATES.get(kind)
    return tokenizer
