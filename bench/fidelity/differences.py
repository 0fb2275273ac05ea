"""Where RLJob and a peer do not compute the same, and why; the bench shows by how much, and fails where they agree after all."""

from __future__ import annotations

from bench.fidelity.batches import TOKENS
from bench.fidelity.cases import Case
from bench.fidelity.shared import GSPO, actor, loss, rule
from rljob_api.v1alpha1.policy_loss import PPOLoss
from rljob_api.vocabulary import AdvantageEstimator, Aggregation, CorrectionLevel, KLEstimator
from rljob_runtime.losses.config import CorrectionMaskConfig


def differences() -> tuple[Case, ...]:
    """All of them, in the order of the report; each is about one peer."""
    return (*_advantages(), *_losses(), *_denominators(), *_bounds())


def _advantages() -> list[Case]:
    grpo = AdvantageEstimator.GRPO
    return [
        Case(
            name="GRPO's epsilon",
            rule=rule(grpo),
            trl={"estimator": True, "loss": False},
            batches=("plain",),
            why="TRL adds 1e-4 to the standard deviation, RLJob and verl 1e-6",
        ),
        Case(
            name="GRPO of 6 equal scores of 0.9",
            rule=rule(grpo),
            verl={"estimator": "grpo"},
            batches=("rounded",),
            why="the float32 mean of equal scores may be rounded, and verl divides what remains by 1e-6; RLJob gives exactly 0",
        ),
        Case(
            name="GRPO of one response to a prompt",
            rule=rule(grpo),
            verl={"estimator": "grpo"},
            batches=("lonely",),
            why="verl trains it towards its score, with baseline 0; in RLJob a group of one has no baseline and teaches nothing",
        ),
        Case(
            name="RLOO of one response to a prompt",
            rule=rule(AdvantageEstimator.RLOO),
            verl={"estimator": "rloo"},
            batches=("lonely",),
            why="the same",
        ),
        Case(
            name="GAE without whitening",
            rule=rule(AdvantageEstimator.GAE, gamma=0.99),
            verl={"estimator": "gae", "gamma": 0.99, "lam": 0.95},
            batches=("plain",),
            only=("advantages",),
            why="verl always whitens; RLJob where advantage.whiten says so",
        ),
    ]


def _losses() -> list[Case]:
    dual = PPOLoss(clipLow=0.2, clipHigh=0.2, dualClip=3.0)
    return [
        Case(
            name="RLOO's loss",
            rule=rule(AdvantageEstimator.RLOO),
            loss=loss(aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM),
            trl={"trainer": "rloo", "estimator": True},
            batches=("plain",),
            only=("loss", "d_logprobs"),
            why="TRL clips the product of a response's ratios, RLJob and verl each token's or their geometric mean",
        ),
        Case(
            name="GSPO with advantages that differ within a response (TRL)",
            loss=loss(GSPO, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN),
            trl={"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
            batches=("plain",),
            why="TRL differentiates the sequence's ratio, RLJob and verl take the paper's token form",
        ),
        Case(
            name="GSPO with a dual clip (verl)",
            loss=loss(GSPO.model_copy(update={"dual_clip": 3.0, "clip_low": 0.2, "clip_high": 0.2})),
            verl={"actor": actor(policy_loss={"loss_mode": "gspo"}, clip_ratio_c=3.0)},
            batches=("extreme",),
            why="verl's GSPO has no dual clip",
        ),
        Case(
            name="verl's dual clip by default",
            loss=loss(),
            verl={"actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}},
            batches=("extreme",),
            why="verl's PPO always has one, 3 if nothing is set; here RLJob's is switched off",
        ),
        Case(
            name="TRL has none by default",
            loss=loss(dual),
            trl={"loss_type": "dapo"},
            batches=("extreme",),
            why="TRL bounds the ratio of negative advantages only with delta; here RLJob's dual clip is 3",
        ),
    ]


def _denominators() -> list[Case]:
    token_mask = CorrectionMaskConfig(level=CorrectionLevel.TOKEN, low=0.5, high=2.0)
    sequence_mask = CorrectionMaskConfig(level=CorrectionLevel.SEQUENCE, low=0.5, high=2.0)
    rejected = "rejected tokens leave verl's mask before it counts the denominators of the batch; in RLJob they stay in them"
    return [
        Case(
            name="responses without trained tokens (TRL, grpo)",
            loss=loss(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN),
            trl={"loss_type": "grpo"},
            batches=("masked",),
            why="they count in TRL's mean over responses, not in RLJob's and verl's",
        ),
        Case(
            name="responses without trained tokens (TRL, dr_grpo)",
            loss=loss(aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, norm_tokens=TOKENS),
            trl={"loss_type": "dr_grpo"},
            batches=("masked",),
            why="the same",
        ),
        Case(
            name="masks of tokens (verl's token_k1)",
            loss=loss(masks=(token_mask,)),
            verl={"correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}, "actor": actor()},
            batches=("extreme",),
            why=rejected,
        ),
        Case(
            name="masks of sequences (verl's seq_sum_k1)",
            loss=loss(masks=(sequence_mask,)),
            verl={"correction": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}, "actor": actor()},
            batches=("extreme",),
            why=rejected,
        ),
        Case(
            name="bounds of verl's token_k1",
            loss=loss(masks=(CorrectionMaskConfig(level=CorrectionLevel.TOKEN, low=0.5, high=5.0),)),
            verl={"correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_5.0"}, "actor": actor()},
            batches=("extreme",),
            why="verl's K1 options bound the engine's over the trainer's probability, RLJob's masks the inverse: [low, high] "
            "there is [1/high, 1/low] here; and the denominators as above",
        ),
        Case(
            name="entropy bonus with sequence means (TRL)",
            loss=loss(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN, entropy_coefficient=0.01),
            trl={"loss_type": "grpo", "entropy_coef": 0.01},
            batches=("plain",),
            only=("d_entropy",),
            why="TRL's entropy is always a mean over tokens; RLJob's and verl's has the aggregation of the loss",
        ),
    ]


def _bounds() -> list[Case]:
    beyond = ("beyond",)
    return [
        Case(
            name="log-ratios beyond 20 (TRL)",
            loss=loss(),
            trl={"loss_type": "dapo"},
            batches=beyond,
            why="RLJob and verl clamp log-ratios to +-20 before exp; TRL's exp goes on",
        ),
        Case(
            name="log-ratios of sequences beyond 10 (verl's GSPO)",
            loss=loss(GSPO.model_copy(update={"clip_low": 0.2, "clip_high": 0.2})),
            verl={"actor": actor(policy_loss={"loss_mode": "gspo"})},
            batches=beyond,
            why="verl's GSPO clamps at 10 from above and not from below, RLJob at +-20; beyond it verl's token gets no gradient",
        ),
        Case(
            name="K1 beyond 20 (verl)",
            loss=loss(kl_coefficient=0.1, kl_estimator=KLEstimator.K1),
            verl={"actor": actor(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1")},
            batches=beyond,
            why="RLJob clamps log-ratios of every estimator, verl those of K3",
        ),
        Case(
            name="K3 above 10 (verl)",
            loss=loss(kl_coefficient=0.1),
            verl={"actor": actor(use_kl_loss=True, kl_loss_coef=0.1)},
            batches=beyond,
            why="verl cuts K3 at 10, so that a token further from the reference gets no pull back; RLJob's pull ends at a log-ratio of 20",
        ),
    ]
