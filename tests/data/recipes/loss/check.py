"""The loss of the recipe: from the manifest through the objective to gradients."""

import math
from pathlib import Path

import pytest
import torch

from rljob_api.crd import schema
from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.validation import check
from rljob_runtime.job import learning_settings
from rljob_runtime.losses.objective import LossInputs, objective
from rljob_runtime.losses.spans import TokenSpans
from tests.unit.api.manifests import manifest


def spec_with(loss: dict[str, object]) -> RLJobSpec:
    document = manifest()
    document["spec"]["algorithm"] = {"policyLoss": loss}
    return check(document).job.spec


def refused(loss: dict[str, object], reported: str) -> None:
    with pytest.raises(SpecInvalidError, match=reported):
        spec_with(loss)


def gradient(loss: dict[str, object]) -> torch.Tensor:
    """Of -A log p + pull (log p - log p_old)^2 with A = 3 and a log-ratio of 0.2, for two tokens of weight 1/2."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(
        behavior_logprobs=torch.tensor([-1.2, -2.2]),
        advantages=torch.tensor([3.0, 3.0]),
        weights=torch.full((2,), 0.5),
        policy_weights=torch.full((2,), 0.5),
        spans=TokenSpans(sequences=(2,), segments=(2,)),
    )
    objective(logprobs, inputs, learning_settings.loss_config(spec_with(loss)), kl_coefficient=0.0).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad


assert math.isclose(gradient({"variant": "Tether"})[0].item(), 0.5 * (-3.0 + 2 * 0.5 * 0.2), rel_tol=1e-5)
assert math.isclose(gradient({"variant": "Tether", "pull": 2.0})[1].item(), 0.5 * (-3.0 + 2 * 2.0 * 0.2), rel_tol=1e-5)
refused({"variant": "Tether", "pull": 11}, r"policyLoss\.pull")
refused({"variant": "Tether", "clipLow": 0.1}, "has no effect with variant Tether")
refused({"variant": "PPO", "pull": 1.0}, "has no effect with variant PPO")
assert '"Tether"' in str(schema.crd()).replace("'", '"')
assert "| `Tether` | -A log p + pull (log rho)^2 | `pull` |\n| `Kimi15` |" in Path("docs/algorithms.md").read_text()
