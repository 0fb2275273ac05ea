from copy import deepcopy

import numpy as np
import pytest

from rljob_api.vocabulary import CallFormat
from rljob_runtime.environments.codec import Codec, Place, PromptSettings
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.environments.templates import TemplateClass
from rljob_runtime.environments.tool_calls import Tool
from rljob_runtime.errors import EnvironmentSetupError
from tests.support.chat_tokenizers import chat_tokenizer

PLACE = Place(turn=0, actions_left=10, max_tokens=64)


def codec(kind: str = "chatml", **settings) -> Codec:
    return Codec(chat_tokenizer(kind), PromptSettings(**settings))


def shown(kind: str, ids) -> str:
    return chat_tokenizer(kind).decode(list(ids))


@pytest.mark.parametrize(
    ("kind", "parameters", "expected"),
    [
        ("chatml", {}, TemplateClass.APPEND_ONLY),
        ("trimming", {}, TemplateClass.SAMPLED_TURN_DIFFERS),
        ("reasoning", {}, TemplateClass.REWRITES_HISTORY),
        ("reasoning", {"enable_thinking": False}, TemplateClass.REWRITES_HISTORY),
        ("role-stops", {}, TemplateClass.APPEND_ONLY),
        ("spaced", {}, TemplateClass.SAMPLED_TURN_DIFFERS),
        ("tools", {}, TemplateClass.APPEND_ONLY),
        ("forgetful", {}, TemplateClass.DROPS_HISTORY),
    ],
)
def test_a_template_is_classified(kind, parameters, expected) -> None:
    assert codec(kind, template_parameters=parameters).template_class == expected


@pytest.mark.parametrize(
    ("kind", "close"), [("chatml", "<|im_end|>"), ("trimming", "<|eot|>"), ("role-stops", "<|user|>"), ("spaced", "</s>")]
)
def test_the_token_that_closes_a_response_is_found(kind, close) -> None:
    assert codec(kind).close_token_id == chat_tokenizer(kind).convert_tokens_to_ids(close)


def test_the_first_prompt_has_system_message_instruction_and_observation() -> None:
    made = codec(system="Play.", turn="Turn {turn_idx}: {observation} {suffix} ({actions_left} left, {max_response_length} tokens)")
    ids = made.first_prompt(Turn(observation="P_G", instruction="Rules.", suffix="Now"), PLACE)
    assert shown("chatml", ids) == (
        "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nRules.\nTurn 1: P_G Now (10 left, 64 tokens)<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.dtype == np.int32


def test_an_instruction_of_the_job_takes_the_place_of_the_environments() -> None:
    turn = Turn(observation="P_G", instruction="Rules.")
    assert "user\nMove.\nP_G<" in shown("chatml", codec(instruction="Move.").first_prompt(turn, PLACE))
    assert "user\nP_G<" in shown("chatml", codec(instruction="").first_prompt(turn, PLACE))


@pytest.mark.parametrize(
    ("kind", "after_close", "after_cut"),
    [
        (
            "chatml",
            "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n",
            "<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("role-stops", "\nnext<|assistant|>\n", "<|user|>\nnext<|assistant|>\n"),
        ("spaced", "<s>[INST] next [/INST]", " </s><s>[INST] next [/INST]"),
    ],
)
def test_a_response_that_was_cut_is_closed(kind, after_close, after_cut) -> None:
    made = codec(kind)
    assert shown(kind, made.continuation(made.close_token_id, Turn(observation="next"), PLACE)) == after_close
    other = chat_tokenizer(kind).encode("t")[0]
    for last in (other, None):
        assert shown(kind, made.continuation(last, Turn(observation="next"), PLACE)) == after_cut


def test_what_a_tool_says_goes_without_the_turns_template() -> None:
    made = codec(turn="Observation: {observation}")
    text = shown("chatml", made.continuation(None, Turn(observation="42", role="tool"), PLACE))
    assert "<|im_start|>tool\n42<|im_end|>" in text


def test_without_a_chat_template_texts_follow_each_other() -> None:
    made = codec("plain", chat_template=False, turn="{observation}\n")
    end = chat_tokenizer("plain").eos_token_id
    first = made.first_prompt(Turn(observation="P_G", instruction="Move."), PLACE)
    assert shown("plain", first) == "Move.\nP_G\n"
    assert shown("plain", made.continuation(end, Turn(observation="_PG"), PLACE)) == "_PG\n"
    assert made.continuation(first[-1], Turn(observation="_PG"), PLACE)[0] == end
    assert made.template_class == TemplateClass.PLAIN


def test_an_environment_reads_a_response_without_special_tokens() -> None:
    made = codec()
    ids = np.asarray([*chat_tokenizer("chatml").encode("<answer>Right</answer>"), made.close_token_id], dtype=np.int32)
    assert made.text(ids) == "<answer>Right</answer>"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("plain", {}, "has no chat template; set chatTemplate: false"),
        ("chatml", {"chat_template": False, "system": "Play."}, "would never be used; remove one of them"),
        ("chatml", {"turn": "{observation} {tun_idx}"}, "names tun_idx; it may name observation, turn_idx"),
        ("chatml", {"turn": "{observation"}, "is not a template: .*write {{ for a brace"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(kind, settings, message) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        codec(kind, **settings)


def test_a_template_that_takes_no_assistant_is_refused() -> None:
    made = deepcopy(chat_tokenizer("chatml"))
    made.chat_template = "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('one turn') }}{% endif %}{% endfor %}"
    with pytest.raises(EnvironmentSetupError, match=r"does not take a conversation .* one turn; set prompt.chatTemplate: false"):
        Codec(made, PromptSettings())


LOOK = Tool(name="look", description="Looks.", parameters={"type": "object", "properties": {"at": {"type": "string"}}})
RESULTS = Turn(observation="a\nb", role="tool", results=("a", "b"))


def test_a_template_with_words_for_tools_describes_them() -> None:
    made = codec("tools", tools=(LOOK,), system="Play.")
    text = shown("tools", made.first_prompt(Turn(observation="P_G"), PLACE))
    assert text.startswith("<|im_start|>system\nPlay.\n\nFunctions:\n{")
    assert text.count('"look"') == 1
    close = made.close_token_id
    assert shown("tools", made.continuation(close, RESULTS, PLACE)) == (
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_without_them_gets_them_in_the_system_message_and_results_from_the_user() -> None:
    made = codec("no-tools", tools=(LOOK,), system="Play.")
    text = shown("no-tools", made.first_prompt(Turn(observation="P_G"), PLACE))
    assert text.startswith("<|im_start|>system\nPlay.\n\n# Tools\n")
    assert '"look"' in text.partition("<|im_start|>user")[0]
    wanted = (
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    for _ in range(2):
        assert shown("no-tools", made.continuation(made.close_token_id, RESULTS, PLACE)) == wanted
    one = Turn(observation="a", role="tool")
    assert "user\n<tool_response>\na\n</tool_response><" in shown("no-tools", made.continuation(None, one, PLACE))


def test_tools_without_a_chat_template_stand_before_the_task() -> None:
    made = codec("plain", chat_template=False, tools=(LOOK,), call_format=CallFormat.TAGS)
    text = shown("plain", made.first_prompt(Turn(observation="P_G", instruction="Move."), PLACE))
    assert text.startswith("# Tools\n")
    assert text.endswith("<look>at</look>: Looks.\n\nMove.\nP_G")
    assert shown("plain", made.continuation(made.close_token_id, RESULTS, PLACE)) == "a\nb"


def test_reasoning_between_calls_is_kept_by_a_template_that_drops_it_at_the_next_question() -> None:
    assert codec("reasoning", tools=(LOOK,)).template_class == TemplateClass.APPEND_ONLY
    assert codec("reasoning").template_class == TemplateClass.REWRITES_HISTORY


def test_tags_of_calls_are_read_where_they_are_special_tokens() -> None:
    tokenizer = deepcopy(chat_tokenizer("tools"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]}, replace_extra_special_tokens=False)
    ids = np.asarray(tokenizer.encode("one <tool_call>{}</tool_call><|im_end|>"), dtype=np.int32)
    assert Codec(tokenizer, PromptSettings(tools=(LOOK,))).text(ids) == "one <tool_call>{}</tool_call>"
    assert Codec(tokenizer, PromptSettings()).text(ids) == "one {}"
