"""The endpoint as clients see it: OpenAI's own, and plain HTTP where it would hide something."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np
import openai
import pytest

from rljob_runtime.environments.endpoint.chat import Chat
from rljob_runtime.environments.endpoint.requests import JobSampling
from rljob_runtime.environments.endpoint.server import Endpoint
from rljob_runtime.environments.endpoint.session import Model
from rljob_runtime.environments.messages import EpisodeAction
from rljob_runtime.environments.outcome import Call, Read
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.pace import HANG_S

USER = {"role": "user", "content": "first question"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Policy:
    """Answers every call with the next of its texts; keeps what came."""

    def __init__(self, *, template: str = "chatml", sampling: JobSampling | None = None, max_calls: int = 10, **limits) -> None:
        self.tokenizer = chat_tokenizer(template)
        self.texts: list[str] = []
        self.calls: list[Call] = []
        self.reads: list[Read] = []
        self.sampled: list[list[int]] = []
        self.holds: threading.Event | None = None
        self.answering: list[threading.Thread] = []
        model = Model(
            name="policy",
            tokenizer=self.tokenizer,
            chat=Chat(self.tokenizer),
            max_calls=max_calls,
            max_tokens_per_call=limits.get("max_tokens_per_call", 64),
            max_sample_tokens=limits.get("max_sample_tokens", 4096),
        )
        self.endpoint = Endpoint(model, sampling or JobSampling(), self._take)
        self.deadline = time.monotonic() + HANG_S
        self.session = self.endpoint.open("e1", self.deadline)

    def client(self, **settings) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.endpoint.url, api_key=self.session.token, timeout=HANG_S, max_retries=0, **settings)

    def post(self, path: str, body: object, **headers: str) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {self.session.token}"} | {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"{self.endpoint.url}{path}", data=data, headers=given)
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _take(self, event: Call | Read) -> None:
        if isinstance(event, Read):
            self.reads.append(event)
            return
        self.calls.append(event)
        ids = self.tokenizer.encode(self.texts.pop(0)) + self.tokenizer.encode("<|im_end|>")
        ids = ids[: event.max_tokens]
        self.sampled.append(ids)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) if event.wants_logprobs else None
        reason = "stop" if len(ids) < event.max_tokens else "length"
        action = EpisodeAction(episode_id="e1", token_ids=np.asarray(ids, np.int32), finish_reason=reason, logprobs=logprobs)

        def answer() -> None:
            if self.holds is not None:
                self.holds.wait(HANG_S)
            self.endpoint.answer("e1", action)

        self.answering.append(threading.Thread(target=answer))
        self.answering[-1].start()

    def close(self) -> None:
        """As the worker's thread, which closes the endpoint after its last answer."""
        for thread in self.answering:
            thread.join(HANG_S)
        self.endpoint.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Policy]]:
    made: list[Policy] = []

    def policy(*texts: str, **settings) -> Policy:
        made.append(Policy(**settings))
        made[-1].texts = list(texts)
        return made[-1]

    yield policy
    for each in made:
        each.close()


def test_a_conversation_of_two_calls(make) -> None:
    policy = make("Right", "Up")
    chat = policy.client().chat.completions
    first = chat.create(model="gpt-4o", messages=[USER], max_tokens=20, logprobs=True, extra_body={"return_token_ids": True})
    (choice,) = first.choices
    assert (choice.message.content, choice.finish_reason, first.model) == ("Right", "stop", "policy")
    assert choice.token_ids == policy.sampled[0]
    assert first.prompt_token_ids == policy.calls[0].token_ids.tolist()
    assert [entry.logprob for entry in choice.logprobs.content] == [-1.0 * n for n in range(1, len(policy.sampled[0]) + 1)]
    assert "".join(entry.token for entry in choice.logprobs.content) == "Right<|im_end|>"
    assert first.usage.completion_tokens == len(policy.sampled[0])
    again = [USER, choice.message, {"role": "user", "content": "and now?"}]
    second = chat.create(model="gpt-4o", messages=again)
    assert second.choices[0].message.content == "Up"
    assert second.choices[0].logprobs is None
    assert [(call.branch, call.wants_logprobs, call.max_tokens) for call in policy.calls] == [(0, True, 20), (0, False, 64)]
    assert second.usage.prompt_tokens == first.usage.total_tokens + len(policy.calls[1].token_ids)
    assert [(read.text, read.kept_tokens) for read in policy.reads] == [("Right", len(policy.sampled[0])), ("Up", len(policy.sampled[1]))]


def test_a_response_at_its_limit(make) -> None:
    policy = make("a very long response of many tokens")
    response = policy.client().chat.completions.create(model="m", messages=[USER], max_completion_tokens=3)
    assert response.choices[0].finish_reason == "length"
    assert response.usage.completion_tokens == 3


def test_streams_have_the_same_text_in_pieces(make) -> None:
    policy = make("word " * 200, "word " * 200, max_tokens_per_call=1500)
    chat = policy.client().chat.completions
    chunks = list(chat.create(model="m", messages=[USER], stream=True, stream_options={"include_usage": True}))
    whole = chat.create(model="m", messages=[USER])
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content == "word " * 200
    assert sum(bool(delta.content) for delta in deltas) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_stream_shows_that_it_lives(make, monkeypatch) -> None:
    monkeypatch.setattr("rljob_runtime.environments.endpoint.server.HEARTBEAT_S", 0.01)
    policy = make("Right")
    policy.holds = threading.Event()
    request = urllib.request.Request(
        f"{policy.endpoint.url}/chat/completions",
        data=json.dumps({"messages": [USER], "stream": True}).encode(),
        headers={"Authorization": f"Bearer {policy.session.token}"},
    )
    with urllib.request.urlopen(request, timeout=HANG_S) as response:
        assert response.readline().startswith(b": ")
        policy.holds.set()
        assert b"Right" in response.read()


def test_tool_calls_come_whole_and_in_streams(make) -> None:
    written = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'
    policy = make(written, written, written, template="tool-calls", max_tokens_per_call=200)
    chat = policy.client().chat.completions
    first = chat.create(model="m", messages=[USER], tools=[TOOL])
    (call,) = first.choices[0].message.tool_calls
    assert (first.choices[0].finish_reason, first.choices[0].message.content) == ("tool_calls", "I look.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"where": "north"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "a wall"}
    chunks = list(chat.create(model="m", messages=[USER, first.choices[0].message, result], tools=[TOOL], stream=True))
    (streamed,) = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert (streamed.function.name, streamed.index) == ("look", 0)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert [call.branch for call in policy.calls] == [0, 0]
    unread = chat.create(model="m", messages=[USER], tools=[TOOL], tool_choice="none")
    assert (unread.choices[0].finish_reason, unread.choices[0].message.content) == ("stop", written)


def test_a_stop_string_cuts_what_counts_and_the_conversation_goes_on(make) -> None:
    policy = make("<answer>Up</answer> and more of it", "Right")
    chat = policy.client().chat.completions
    first = chat.create(model="m", messages=[USER], stop=["</answer>", "never"])
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("<answer>Up", "stop")
    (read,) = policy.reads
    kept = policy.tokenizer.decode(policy.sampled[0][: read.kept_tokens])
    assert kept.startswith("<answer>Up</answer>")
    assert "</answer>" not in policy.tokenizer.decode(policy.sampled[0][: read.kept_tokens - 1])
    chat.create(model="m", messages=[USER, first.choices[0].message, USER])
    assert policy.calls[1].branch == 0
    assert policy.tokenizer.decode(policy.calls[1].token_ids.tolist()).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("restored", [False, True])
def test_a_stop_string_that_the_program_puts_back_is_there_once(make, restored) -> None:
    policy = make("<answer>Up</answer> and more of it", "Right</answer>", "Left")
    completions = policy.client().completions
    prompt = "first question"
    for more in (" goes on", " further"):
        said = completions.create(model="m", prompt=prompt, stop=["</answer>"]).choices[0].text
        prompt += said + "</answer>" * restored + more
    completions.create(model="m", prompt=prompt)
    assert [call.branch for call in policy.calls] == [0, 0, 0]
    kept = [ids[: read.kept_tokens] for ids, read in zip(policy.sampled, policy.reads, strict=True)]
    parts = [ids for call, sampled in zip(policy.calls, kept, strict=True) for ids in (call.token_ids.tolist(), sampled)]
    whole = policy.tokenizer.decode([token for part in parts[:-1] for token in part])
    assert whole == "first question<answer>Up</answer> goes onRight</answer> further"


def test_a_chat_that_puts_the_stop_string_back_continues_its_sample(make) -> None:
    policy = make("<answer>Up</answer> and more of it", "Right")
    chat = policy.client().chat.completions
    said = chat.create(model="m", messages=[USER], stop=["</answer>"]).choices[0].message.content
    chat.create(model="m", messages=[USER, {"role": "assistant", "content": f"{said}</answer>"}, USER])
    assert policy.calls[1].branch == 0
    assert policy.tokenizer.decode(policy.calls[1].token_ids.tolist()).startswith("<|im_end|>\n<|im_start|>user")


def test_completions_of_text_and_of_token_ids(make) -> None:
    policy = make("Right", "Up", "Left")
    completions = policy.client().completions
    first = completions.create(model="m", prompt="first question", logprobs=0, extra_body={"return_token_ids": True})
    assert (first.choices[0].text, first.choices[0].finish_reason) == ("Right", "stop")
    assert first.choices[0].logprobs.token_logprobs[0] == -1.0
    ids = [*first.prompt_token_ids, *first.choices[0].token_ids, 7]
    second = completions.create(model="m", prompt=ids)
    assert second.choices[0].text == "Up"
    assert (policy.calls[1].branch, policy.calls[1].token_ids.tolist()) == (0, [7])
    pieces = [chunk.choices[0].text for chunk in completions.create(model="m", prompt="other", stream=True)]
    assert "".join(pieces) == "Left"
    assert policy.calls[2].branch == 1


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"unheard_of": 1, "reasoning_effort": "low"}, "unheard_of", "unsupported parameter: unheard_of, reasoning_effort"),
        ({"n": 2}, "n", "n is 2: one response a call"),
        ({"temperature": 0.2}, "temperature", "temperature is 0.2, and the job samples with 1; leave it out, or set harness.sampling: Job"),
        ({"seed": 3}, "seed", "seed is 3, and the job gives each response a seed"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice may be auto or none"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias", "changes the distribution"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs", "top_logprobs is 2"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "stop has 5 texts; at most 4"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"content": "x"}]}, "messages.0", "messages.0 has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "parts of type text"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, None, "tokens; prompt and responses together may have 4096"),
    ],
)  # fmt: skip
def test_what_is_not_carried_out_is_an_error_that_names_it(make, change, param, message) -> None:
    policy = make()
    status, text = policy.post("/chat/completions", {"model": "m", "messages": [USER]} | change)
    error = json.loads(text)["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert re.search(re.escape(message), error["message"])
    assert policy.calls == []


def test_the_jobs_sampling_where_it_replaces_the_calls(make) -> None:
    policy = make("Right", sampling=JobSampling(replaces=True))
    policy.client().chat.completions.create(model="m", messages=[USER], temperature=0.2, seed=5, top_p=0.5)
    assert len(policy.calls) == 1


def test_text_parts_and_the_developers_role_are_understood(make) -> None:
    policy = make("Right")
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    policy.client().chat.completions.create(model="m", messages=messages)
    assert policy.calls[0].text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>")


def test_only_the_episodes_own_key_is_served_while_it_lasts(make) -> None:
    policy = make()
    assert policy.post("/chat/completions", {}, Authorization="Bearer nobody")[0] == 401
    assert policy.post("/chat/completions", b"no JSON")[0] == 400
    assert policy.post("/nothing", {})[0] == 404
    assert [model.id for model in policy.client().models.list()] == ["policy"]
    policy.endpoint.end("e1")
    with pytest.raises(openai.APIStatusError, match="the episode is over") as over:
        policy.client().chat.completions.create(model="m", messages=[USER])
    assert over.value.status_code == 410


def test_no_more_calls_than_turns(make) -> None:
    policy = make("Right", max_calls=1)
    policy.client().chat.completions.create(model="m", messages=[USER])
    with pytest.raises(openai.APIStatusError, match=r"had its 1 calls \(maxTurns\)"):
        policy.client().chat.completions.create(model="m", messages=[USER])
    assert policy.session.num_refused == 1


def test_a_call_waits_no_longer_than_its_episode(make) -> None:
    policy = make("Right")
    policy.holds = threading.Event()
    policy.session.deadline = time.monotonic() + 0.05
    status, text = policy.post("/chat/completions", {"messages": [USER]})
    policy.holds.set()
    assert (status, json.loads(text)["error"]["code"]) == (410, "episode_over")


def test_a_repeated_call_gets_the_answer_that_was_lost(make) -> None:
    policy = make("Right", "Up")
    body = {"messages": [USER]}
    first = policy.post("/chat/completions", body)
    assert policy.post("/chat/completions", body, x_stainless_retry_count="1") == first
    assert len(policy.calls) == 1
    assert json.loads(policy.post("/chat/completions", body)[1])["choices"][0]["message"]["content"] == "Up"


def test_calls_at_the_same_time_are_answered_one_after_the_other(make) -> None:
    policy = make(*["Right"] * 4)
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(policy.post("/chat/completions", {"messages": [USER], "max_tokens": n})[0]))
        for n in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert answers == [200] * 4
    assert [call.branch for call in policy.calls] == [0, 1, 2, 3]
