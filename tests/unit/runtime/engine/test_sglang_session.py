"""Which calls of SGLang's server a session makes, with a fake server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.sglang.client import SglangClient
from rljob_runtime.engine.sglang.session import GROUP_SIZE, SglangSession
from rljob_runtime.records import Completion, GenerationRequest, Sampling
from tests.support.pace import HANG_S
from tests.support.records import ids, tokens


class Server:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        """Names of the requests of each stream."""
        self.posts: list[tuple[str, Mapping[str, Any]]] = []
        self.streams: list[asyncio.Queue[list[dict[str, Any]] | None]] = []

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        assert path == "/generate"
        queue: asyncio.Queue[list[dict[str, Any]] | None] = asyncio.Queue()
        self.calls.append(body["rid"])
        self.streams.append(queue)
        while (pieces := await queue.get()) is not None:
            for piece in pieces:
                yield piece

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        self.posts.append((path, body))
        if path != "/generate":
            return None
        rows = [[[None, 0, None], *([-float(token), token, None] for token in row[1:])] for row in body["input_ids"]]
        return [{"meta_info": {"input_token_logprobs": row}} for row in rows]


class Scene:
    """A session of that server, what it publishes, and why it failed."""

    def __init__(self, places: int) -> None:
        self.server = Server()
        self.finished: dict[str, Completion] = {}
        self.failure = ""
        self.session = SglangSession(
            client=cast(SglangClient, self.server),
            config=EngineConfig(model_path="m", max_model_len=32, max_num_seqs=places, threads=1),
            vocab_size=100,
            extra_eos=None,
            decode=None,
            publish=lambda found: self.finished.update({completion.request_id: completion for completion in found}),
            fail=self._fail,
        )

    def _fail(self, reason: str) -> None:
        self.failure = reason

    def add(self, count: int) -> None:
        sampling = Sampling(max_tokens=4)
        self.session.add(
            [GenerationRequest(request_id=f"r{i}", prompt_token_ids=ids(1, 2), sampling=sampling, seed=i) for i in range(count)]
        )

    def answer(self, call: int, pieces: Sequence[tuple[str, int, str | None]]) -> None:
        """Name, token, and why it ended."""
        self.server.streams[call].put_nowait([piece(*each) for each in pieces])


def piece(name: str, token: int, ended: str | None) -> dict[str, Any]:
    meta: dict[str, Any] = {"id": name, "prompt_tokens": 2, "output_token_logprobs": [[-0.5, token, None]]}
    meta["finish_reason"] = {"type": ended} if ended else None
    if ended:
        meta["weight_versions"] = [{"version": "0", "start": 0, "end": 1}]
    return {"output_ids": [token], "meta_info": meta}


async def settled(true: Callable[[], object]) -> None:
    async def wait() -> None:
        while not true():
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), HANG_S)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(main())


def test_requests_submitted_together_go_in_calls_of_a_group() -> None:
    async def main() -> None:
        scene = Scene(places=GROUP_SIZE + 10)
        scene.add(GROUP_SIZE + 20)
        await settled(lambda: len(scene.server.streams) == 2)
        assert [len(call) for call in scene.server.calls] == [GROUP_SIZE, 10]
        assert scene.session.stats()["waiting"] == 10

    run(main)


def test_pieces_reach_their_own_response_and_ended_ones_leave_their_places_to_one_call() -> None:
    async def main() -> None:
        scene = Scene(places=4)
        scene.add(7)
        await settled(lambda: scene.server.streams)
        (names,) = scene.server.calls
        ended = [(name, 20 + at, "length") for at, name in enumerate(names) if at != 1]
        scene.answer(0, [*ended[::-1], (names[1], 50, None)])
        await settled(lambda: len(scene.server.streams) == 2)
        assert {name: tokens(completion) for name, completion in scene.finished.items()} == {"r0": (20,), "r2": (22,), "r3": (23,)}
        assert len(scene.server.calls[1]) == 3
        assert scene.session.stats()["running"] == 4

    run(main)


def test_what_fails_while_waiting_requests_take_places_is_the_engines_failure() -> None:
    """Nobody waits for that call of the event loop, so its error would be lost, and the requests would wait for ever."""

    async def main() -> None:
        scene = Scene(places=1)
        scene.add(1)
        broken = GenerationRequest(request_id="b", prompt_token_ids=ids(1), sampling=cast(Sampling, None), seed=0)
        scene.session.add([broken])
        await settled(lambda: scene.server.streams)
        ((name,),) = scene.server.calls
        scene.answer(0, [(name, 5, "length")])
        await settled(lambda: scene.failure)
        assert scene.failure.startswith("the SGLang engine failed: AttributeError: ")

    run(main)


def test_an_abort_ends_one_request_of_a_call() -> None:
    async def main() -> None:
        scene = Scene(places=4)
        scene.add(3)
        await settled(lambda: scene.server.streams)
        (names,) = scene.server.calls
        scene.answer(0, [(name, 5, None) for name in names])
        await settled(lambda: scene.session.stats()["generated_tokens"] == 3)
        scene.session.abort(["r1"])
        await settled(lambda: scene.server.posts)
        assert scene.server.posts == [("/abort_request", {"rid": names[1]})]

    run(main)


def test_a_stream_that_ends_before_its_responses_loses_the_engine() -> None:
    async def main() -> None:
        scene = Scene(places=4)
        scene.add(3)
        await settled(lambda: scene.server.streams)
        scene.answer(0, [(scene.server.calls[0][0], 5, "length")])
        scene.server.streams[0].put_nowait(None)
        await settled(lambda: scene.failure)
        assert "closed the connection before the end of 2 responses" in scene.failure
        assert scene.finished.keys() == {"r0"}

    run(main)


def test_sequences_to_score_go_in_calls_of_a_group_and_come_back_in_order() -> None:
    async def main() -> None:
        scene = Scene(places=4)
        sequences = [(1, i, i + 1) for i in range(2, GROUP_SIZE + 8)]
        found = await scene.session.score(sequences)
        assert found == [(-float(i), -float(i + 1)) for _, i, _ in sequences]
        assert [len(body["rid"]) for _, body in scene.server.posts] == [GROUP_SIZE, 6]

    run(main)
