"""Turns that are prompts of their own: what they show of the turns before, and how long they may be."""

import pytest

from rljob_api.vocabulary import PromptMemory
from rljob_runtime.environments.codec import PromptSettings
from rljob_runtime.environments.messages import StopReason
from rljob_runtime.environments.turn_prompts import Memory
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.environments import Player, environment_config, environment_worker

TEMPLATE = (
    "{env_instruction} | {step_count} done, now {current_step}, {actions_left} left | {history_length}: {history} | {current_observation}"
)
ACTIONS = ("<answer>Up</answer>", "fly", "<answer>Right</answer>")
MAPS = ["__O_\n__G_\n____\n_P_O", "__O_\n__G_\n_P__\n___O"]
"""Of seed 3, and after the first action; the second one changes nothing."""


def settings(turns: int, kind: PromptMemory = PromptMemory.TURNS, **changes) -> PromptSettings:
    return PromptSettings(**{"instruction": "Cross.", "turn": TEMPLATE, "memory": Memory(turns=turns, kind=kind)} | changes)


def prompts(tmp_path, prompt: PromptSettings, **changes) -> list[str]:
    """What the policy reads before each of its actions."""
    given = {"parameters": {"is_slippery": False}, "format_penalty": -0.25, "max_turns": 3, "prompt": prompt} | changes
    worker = environment_worker([environment_config(**given)], tmp_path)
    try:
        replies = Player(worker).play("e1", ACTIONS, seed=3)
    finally:
        worker.close()
    assert replies[-1].stop is (StopReason.MAX_TURNS if len(replies) == 4 else StopReason.MAX_TOKENS)
    return [chat_tokenizer("chatml").decode(reply.token_ids.tolist()) for reply in replies if not reply.done]


def entry(number: int, action: str, reward: str) -> str:
    return f"(step: {number}, observation: {MAPS[number - 1]}, action: {action}, reward: {reward})"


VALID = entry(1, ACTIONS[0], "0")
INVALID = entry(2, "fly (this action was not valid: follow the format that is asked for)", "-0.25")


@pytest.mark.parametrize(
    ("memory", "second", "third"),
    [
        (settings(5), f"1: {VALID}", f"2: {VALID}, {INVALID}"),
        (settings(1), f"1: {VALID}", f"1: {INVALID}"),
        (settings(0), "0: ", "0: "),
        (settings(5, PromptMemory.INVALID_TURNS), "1: ", f"2: {INVALID}"),
        (settings(5, PromptMemory.OBSERVATIONS), f"1: {MAPS[0]}", f"2: {MAPS[0]}\n{MAPS[1]}"),
    ],
)
def test_a_turn_shows_the_turns_before_it_as_far_as_its_memory_goes(tmp_path, memory: PromptSettings, second: str, third: str) -> None:
    def prompt(text: str) -> str:
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    assert prompts(tmp_path, memory) == [
        prompt(f"Cross. | 0 done, now 1, 3 left | 0:  | {MAPS[0]}"),
        prompt(f"Cross. | 1 done, now 2, 2 left | {second} | {MAPS[1]}"),
        prompt(f"Cross. | 2 done, now 3, 1 left | {third} | {MAPS[1]}"),
    ]


def test_only_a_turns_own_prompt_counts_for_its_length(tmp_path) -> None:
    """An episode is longer than the limit; the third prompt alone, with its memory, is not too long."""
    lengths = [len(chat_tokenizer("chatml").encode(text)) for text in prompts(tmp_path, settings(1))]
    assert len(prompts(tmp_path, settings(1), max_episode_tokens=max(lengths) + 1)) == 3
    assert len(prompts(tmp_path, settings(1), max_episode_tokens=max(lengths))) == 2


def test_without_a_chat_template_each_turn_is_its_text_alone(tmp_path) -> None:
    found = prompts(tmp_path, settings(0, chat_template=False, turn="{current_observation}\n", instruction=None))
    assert found == [f"{MAPS[0]}\n", f"{MAPS[1]}\n", f"{MAPS[1]}\n"]
