"""The reward worker: token ids to texts with the policy's tokenizer, texts to scores in the pool's processes.

Decoding belongs here and not in the driver: it costs more for each token than all else the driver does with it, and there are as many of
these workers as a job asks for. The tokenizer's own files come from the driver, so that a node that only scores needs no model folder.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_runtime.data.tokenizer import decode, import_ahead, load_tokenizer
from rljob_runtime.errors import RewardSetupError
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import Judgement, RewardRequest, RewardResult
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.judging.config import Served
from rljob_runtime.rewards.judging.desk import NONE_SERVED, JudgeDesk, Question, api_key, question_of
from rljob_runtime.rewards.pool import RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardWorker:
    """One process of a reward component. Calls may overlap: while one waits for its judges, others use tokenizer and pool."""

    def __init__(self, configs: Sequence[RewardConfig], *, log_file: Path, folder: Path | None = None) -> None:
        """Start the pool, see :class:`RewardPool`; ``prepare`` comes before the first ``score``.

        Raises:
            RewardSetupError: a reward cannot be loaded, or a judge has no key.
        """
        self._judged = [config for config in configs if config.judge is not None]
        for config in self._judged:
            api_key(config)
        self._desk: JudgeDesk | None = None
        self._pool = RewardPool(configs, log_file=log_file, folder=folder)
        import_ahead()  # engines start meanwhile; for ``prepare`` everything waits
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._lock = threading.Lock()
        """Of tokenizer and pool, which serve one call at a time."""

    def prepare(self, tokenizer_files: Mapping[str, bytes], trust_remote_code: bool, served: Mapping[str, Served] = NONE_SERVED) -> None:
        """Load the tokenizer from its files, by their path in the model's folder; ``served`` are judges of the job by their component.

        Raises:
            ModelError: it cannot be loaded.
            RewardSetupError: a judge's component serves nothing.
        """
        if self._judged:
            self._desk = JudgeDesk(self._judged, served=served)
        with tempfile.TemporaryDirectory(prefix="rljob-tokenizer-") as folder:
            for name, data in tokenizer_files.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            self._tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)

    def score(self, batch: RewardBatch) -> list[RewardResult]:
        """One result for each response, in order; see :meth:`RewardPool.score`.

        Raises:
            RewardSetupError: there is no tokenizer yet, a process cannot be replaced, a prompt's tag has no reward, or a judge's endpoint
                refuses the job.
        """
        if self._tokenizer is None:
            raise RewardSetupError("score was called before prepare: the reward worker has no tokenizer yet")
        with self._lock:
            texts = decode(self._tokenizer, batch.responses())
        requests = [
            RewardRequest(sample_id=sample_id, prompt=prompt, response_text=text, finish_reason=reason)
            for sample_id, prompt, text, reason in zip(batch.sample_ids, batch.prompts, texts, batch.finish_reasons, strict=True)
        ]
        judgements = None if self._desk is None else self._judgements(self._desk, requests)
        with self._lock:
            return self._pool.score(requests, judgements)

    def _judgements(self, desk: JudgeDesk, requests: Sequence[RewardRequest]) -> list[dict[str, Judgement]]:
        """What judges say of each response, by reward; all are asked at once."""
        judged: list[dict[str, Judgement]] = [{} for _ in requests]
        asked: list[tuple[dict[str, Judgement], Question]] = []
        for request, found in zip(requests, judged, strict=True):
            questions = (question_of(config, request) for config in self._pool.judges_of(request))
            asked += [(found, question) for question in questions if question is not None]
        for (found, question), judgement in zip(asked, desk.ask([question for _, question in asked]), strict=True):
            found[question.reward] = judgement
        return judged

    def describe_sandbox(self) -> str:
        """What keeps the scoring processes in, as they found it on this machine."""
        return self._pool.describe_sandbox()

    def close(self) -> None:
        """End all processes, and what judges are asked; may be called twice."""
        if self._desk is not None:
            self._desk.close()
        self._pool.close()
