import re
import threading

import numpy as np
import pytest

from rljob_runtime.environments.local import LocalHost
from rljob_runtime.environments.messages import EpisodeAction, StopReason
from rljob_runtime.environments.templates import TemplateClass
from rljob_runtime.errors import EnvironmentSetupError
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.environments import LIMIT_S, Player, ShiftedClock, environment_config, environment_worker, plain_prompt, tokens
from tests.support.pace import HANG_S

WAY = ("<answer>Up</answer>", "<answer>Up</answer>", "<answer>Right</answer>")
"""Solves the lake of seed 3."""


@pytest.fixture
def make_player(tmp_path):
    workers = []

    def make(*configs, **changes) -> Player:
        workers.append(environment_worker(configs or [lake(**changes)], tmp_path))
        return Player(workers[-1])

    yield make
    for worker in workers:
        worker.close()


def lake(**changes):
    return environment_config(**({"parameters": {"is_slippery": False, "env_instruction": "Cross."}} | changes))


def shown(ids) -> str:
    return chat_tokenizer("chatml").decode(ids.tolist())


def test_an_episode_from_its_prompt_to_its_end(make_player) -> None:
    first, *turns = make_player().play("e1", WAY, seed=3)
    assert shown(first.token_ids).endswith("_P_O<|im_end|>\n<|im_start|>assistant\n")
    assert shown(first.token_ids).startswith("<|im_start|>user\nCross.\nThe meaning")
    assert (first.turn, first.reward, first.action, first.max_tokens) == (0, 0.0, "", 32)
    assert shown(turns[0].token_ids) == "\n<|im_start|>user\n__O_\n__G_\n_P__\n___O<|im_end|>\n<|im_start|>assistant\n"
    assert [(t.turn, t.reward, t.done, t.stop) for t in turns] == [
        (1, 0.0, False, StopReason.NOT_YET),
        (2, 0.0, False, StopReason.NOT_YET),
        (3, 1.0, True, StopReason.DONE),
    ]
    assert turns[-1].token_ids.size == 0
    assert turns[-1].observation == "__O_\n__√_\n____\n___O"
    assert turns[-1].action == "<answer>Right</answer>"
    assert turns[-1].summary == {"success": 1.0, "action_is_valid": 1.0, "action_is_effective": 1.0, "format_penalty": 0.0}


def test_equal_states_have_equal_keys(make_player) -> None:
    first, away, back = make_player().play("e1", ["<answer>Up</answer>", "<answer>Down</answer>"], seed=3)
    assert first.state_key == back.state_key != away.state_key


def test_the_same_seed_is_the_same_task(make_player) -> None:
    player = make_player()
    a, b, c = (player.play(key, [], seed=seed)[0] for key, seed in (("a", 3), ("b", 3), ("c", 4)))
    assert a.token_ids.tolist() == b.token_ids.tolist() != c.token_ids.tolist()


def test_an_action_that_was_not_understood_costs_the_penalty(make_player) -> None:
    player = make_player(format_penalty=-0.25, max_turns=2)
    replies = player.play("e1", ["nothing", "<answer>Up</answer>"], seed=3)
    assert [(r.reward, r.action_valid) for r in replies[1:]] == [(-0.25, False), (0.0, True)]
    assert replies[-1].stop == StopReason.MAX_TURNS
    assert replies[-1].summary["action_is_valid"] == 0.5


def test_a_response_that_was_cut_is_closed_with_a_given_token(make_player) -> None:
    player = make_player()
    player.play("e1", [], seed=3)
    player.worker.submit([EpisodeAction(episode_id="e1", token_ids=tokens("<answer>Up</answer>", close=""), finish_reason="length")])
    assert shown(player.wait("e1", 2).token_ids).startswith("<|im_end|>\n<|im_start|>user")


def test_an_episode_ends_where_there_is_no_room_for_an_action(make_player) -> None:
    player = make_player()
    first = player.play("long", [], seed=3)[0]
    limit = len(first.token_ids) + 40
    player = make_player(max_episode_tokens=limit)
    reply = player.play("e1", [], seed=3)[0]
    assert reply.max_tokens == 32
    spent = len(reply.token_ids)
    while not reply.done:
        sampled = np.resize(tokens("Up", close=""), reply.max_tokens)  # as long as it may be
        player.worker.submit([EpisodeAction(episode_id="e1", token_ids=sampled, finish_reason="length")])
        reply = player.wait("e1", len(player.replies["e1"]) + 1)
        spent += len(sampled) + len(reply.token_ids)
    assert reply.stop == StopReason.MAX_TOKENS
    assert reply.token_ids.size == 0
    assert spent <= limit


def test_a_first_prompt_without_room_is_an_error(make_player) -> None:
    (reply,) = make_player(max_episode_tokens=8).play("e1", [])
    assert reply.done
    assert re.search("the first prompt has .* tokens, and an episode at most 8; raise the limit", reply.error)


def test_without_a_chat_template(make_player) -> None:
    player = make_player(prompt=plain_prompt(instruction=""))
    first = player.play("e1", [], seed=3)[0]
    assert shown(first.token_ids) == "__O_\n__G_\n____\n_P_O\n"


def test_many_environments_and_episodes_at_once(make_player) -> None:
    box = environment_config("boxes", "Sokoban", parameters={"dim_room": [6, 6], "num_boxes": 1}, max_turns=4)
    player = make_player(lake(max_turns=4), box)
    keys = [f"e{number}" for number in range(64)]
    player.play_all(keys, lambda reply: "<answer>Down</answer>")
    player.play_all([f"s{number}" for number in range(16)], lambda reply: "<answer>Down</answer>", environment="boxes")
    metrics = player.worker.metrics()
    assert metrics["running"] == 0
    assert metrics["resets"] == 80
    assert metrics["steps"] == sum(len(replies) - 1 for replies in player.replies.values())
    assert metrics["ended/done"] + metrics["ended/maxTurns"] == 80
    assert metrics["step_s"] > 0


def test_an_episode_that_is_given_up_is_forgotten(make_player) -> None:
    player = make_player()
    player.play("e1", [], seed=3)
    player.end("e1")
    player.end("never")
    player.act("e1", WAY[0])
    assert "no such episode runs in this worker" in player.wait("e1", 2).error


@pytest.mark.parametrize("act_before", [False, True])
def test_the_time_of_an_episode_includes_the_drivers(make_player, act_before, monkeypatch) -> None:
    clock = ShiftedClock(monkeypatch)
    player = make_player(episode_timeout_s=HANG_S)
    player.play("e1", WAY[:1] if act_before else [], seed=3)
    clock.shift_s = 2 * HANG_S
    player.play("e2", [], seed=3)  # the worker has looked at all deadlines before its reply arrives
    player.act("e1", WAY[1])
    last = player.wait("e1", 2 + act_before)
    assert (last.stop, last.error, last.turn) == (StopReason.TIMEOUT, None, int(act_before))


def test_messages_that_fit_nothing_are_answered(make_player) -> None:
    player = make_player()
    player.start("e1", environment="sea")
    assert "no environment 'sea'; there are lake" in player.wait("e1").error
    player.act("e2", "x")
    assert "start it first" in player.wait("e2").error


def test_what_the_driver_needs_to_know(make_player) -> None:
    (described,) = make_player().worker.describe()
    assert described.template_class == TemplateClass.APPEND_ONLY
    assert described.stop_token_ids == (chat_tokenizer("chatml").convert_tokens_to_ids("<|im_end|>"),)


def test_an_empty_action_is_an_action(make_player) -> None:
    player = make_player()
    player.play("e1", [], seed=3)
    player.worker.submit([EpisodeAction(episode_id="e1", token_ids=np.zeros(0, dtype=np.int32), finish_reason="length")])
    reply = player.wait("e1", 2)
    assert (reply.action_valid, shown(reply.token_ids)[:10]) == (False, "<|im_end|>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "FrozenSea"}, "environment type 'FrozenSea' is unknown; use FrozenLake, Sokoban, ReasoningGym, ToolUse, Chat, or name"),
        ({"parameters": {"sise": 4}}, "parameters of FrozenLake: sise: Extra"),
        (
            {"kind": "ReasoningGym", "parameters": {"task": "basic_arithmetics"}},
            "reasoning-gym has no task .*did you mean basic_arithmetic",
        ),
    ],
)
def test_what_cannot_be_set_up_is_refused(make_player, changes, message) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        make_player(environment_config(**changes))


def test_an_answer_that_reasoning_gym_evaluates_reaches_nothing_outside(make_player, tmp_path) -> None:
    """The score of countdown is SymPy's parse_expr, which runs Python."""
    player = make_player(environment_config("gym", kind="ReasoningGym", parameters={"task": "countdown"}, max_tokens_per_turn=400))
    written = tmp_path / "written"
    *_, scored = player.play("e1", [f"<answer>__import__('os').mkdir({str(written)!r})</answer>"], environment="gym")
    assert (scored.done, scored.action_valid, written.exists()) == (True, True, False)


def test_a_worker_whose_loop_hangs_answers_calls_and_says_where(make_player, monkeypatch, capfd) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def a_game_that_hangs(self, key, seed) -> None:
        begun.set()
        goes_on.wait(LIMIT_S)

    player = make_player()
    monkeypatch.setattr(LocalHost, "begin", a_game_that_hangs)
    player.start("e1")
    assert begun.wait(LIMIT_S)
    player.end("e1")
    assert player.worker.collect(0.0) == []
    player.worker.print_stacks()
    goes_on.set()
    assert "a_game_that_hangs" in capfd.readouterr().err
