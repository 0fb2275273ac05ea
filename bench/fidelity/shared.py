"""Variants that RLJob shares with a peer: losses, gradients and advantages agree."""

from __future__ import annotations

from typing import Any

from bench.fidelity.batches import SHARED, TOKENS
from bench.fidelity.cases import Case
from rljob_api.v1alpha1.policy_loss import CISPOLoss, GSPOLoss, PPOLoss, VanillaLoss
from rljob_api.vocabulary import AdvantageEstimator, Aggregation, CorrectionLevel, KLEstimator, KLPlacement, ProximalPolicy
from rljob_runtime.losses.config import CorrectionMaskConfig, CorrectionWeightConfig, LossConfig
from rljob_runtime.losses.value_config import ValueLossConfig
from rljob_runtime.overlap.rule_config import RuleConfig

NEVER = 1e9
"""A bound that no ratio of these batches reaches."""
PPO = PPOLoss(clipLow=0.2, clipHigh=0.2, dualClip=0.0)
DAPO = PPOLoss(clipLow=0.2, clipHigh=0.28, dualClip=0.0)
GSPO = GSPOLoss(clipLow=3e-4, clipHigh=4e-4, dualClip=0.0)
GSPO_BOUNDS = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
WITHOUT_MASKED = tuple(batch for batch in SHARED if batch != "masked")
"""TRL counts a response without trained tokens in its mean over responses, see :mod:`.differences`."""

AGGREGATIONS = {
    Aggregation.TOKEN_MEAN: ("token-mean", "dapo"),
    Aggregation.SEQ_MEAN_TOKEN_MEAN: ("seq-mean-token-mean", "grpo"),
    Aggregation.SEQ_MEAN_TOKEN_SUM: ("seq-mean-token-sum", "luspo"),
    Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: ("seq-mean-token-sum-norm", "dr_grpo"),
}
"""Names in verl and TRL."""
KL_NAMES = {KLEstimator.K1: "k1", KLEstimator.K2: "k2", KLEstimator.K3: "k3", KLEstimator.ABS: "abs"}


def rule(estimator: AdvantageEstimator, **settings: Any) -> RuleConfig:
    """A learning rule without anything that is not asked for."""
    return RuleConfig(**{"max_response_tokens": TOKENS, "estimator": estimator, "whiten": False, **settings})


def loss(policy: Any = PPO, **settings: Any) -> LossConfig:
    """A policy loss whose old policy is the trainer's at the beginning of the step."""
    return LossConfig(**{"policy": policy, "proximal": ProximalPolicy.RECOMPUTE, **settings})


def actor(**settings: Any) -> dict[str, Any]:
    """verl's actor with clip 0.2 and no dual clip."""
    return {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": NEVER, **settings}


def cases() -> tuple[Case, ...]:
    """All of them, in the order of the report."""
    return (*_recipes(), *_other_recipes(), *_advantages(), *_losses(), *_aggregations(), *_kl(), *_corrections(), *_values(), *_heads())


def _recipes() -> list[Case]:
    """Whole algorithms with GRPO's advantages, from scores to gradients."""
    grpo = AdvantageEstimator.GRPO
    sequences, norm = Aggregation.SEQ_MEAN_TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    return [
        Case(
            name="GRPO: std-normalized, sequence mean of token means, K3 in the loss",
            rule=rule(grpo),
            loss=loss(aggregation=sequences, kl_coefficient=0.04),
            verl={"estimator": "grpo", "actor": actor(loss_agg_mode="seq-mean-token-mean", use_kl_loss=True, kl_loss_coef=0.04)},
        ),
        Case(
            name="GRPO with TRL's epsilon",
            trl_epsilon=1e-4,
            loss=loss(aggregation=sequences, kl_coefficient=0.04),
            trl={"estimator": True, "loss_type": "grpo", "beta": 0.04},
            batches=WITHOUT_MASKED,
        ),
        Case(
            name="Dr. GRPO: no std, fixed length normalizer",
            rule=rule(grpo, normalize_std=False),
            loss=loss(aggregation=norm, norm_tokens=TOKENS),
            verl={
                "estimator": "grpo",
                "norm_std": False,
                "actor": actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=TOKENS),
            },
            trl={"estimator": True, "scale_rewards": "none", "loss_type": "dr_grpo"},
            batches=WITHOUT_MASKED,
        ),
        Case(
            name="DAPO: clip-higher, token mean",
            rule=rule(grpo),
            loss=loss(DAPO),
            verl={"estimator": "grpo", "actor": actor(clip_ratio_high=0.28)},
        ),
        Case(
            name="DAPO with TRL's epsilon",
            trl_epsilon=1e-4,
            loss=loss(DAPO),
            trl={"estimator": True, "loss_type": "dapo", "epsilon_high": 0.28},
        ),
    ]


def _other_recipes() -> list[Case]:
    """Whole algorithms, from scores to gradients."""
    grpo, rloo, gae = AdvantageEstimator.GRPO, AdvantageEstimator.RLOO, AdvantageEstimator.GAE
    sequences = Aggregation.SEQ_MEAN_TOKEN_MEAN
    return [
        Case(
            name="GSPO",
            rule=rule(grpo, normalize_std=False),
            loss=loss(GSPO, aggregation=sequences),
            verl={
                "estimator": "grpo",
                "norm_std": False,
                "actor": actor(loss_agg_mode="seq-mean-token-mean", policy_loss={"loss_mode": "gspo"}, **GSPO_BOUNDS),
            },
            trl={
                "estimator": True,
                "scale_rewards": "none",
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon_low": 3e-4,
                "epsilon_high": 4e-4,
            },
            batches=WITHOUT_MASKED,
        ),
        Case(
            name="RLOO with K1 in the reward",
            rule=rule(rloo, kl_placement=KLPlacement.REWARD, kl_estimator=KLEstimator.K1, kl_coefficient=0.05),
            loss=loss(VanillaLoss()),
            verl={"estimator": "rloo", "kl_reward": ["k1", 0.05], "actor": actor(policy_loss={"loss_mode": "gpg"})},
        ),
        Case(
            name="REINFORCE++ with K2 in the reward",
            rule=rule(
                AdvantageEstimator.REINFORCE_PLUS_PLUS, kl_placement=KLPlacement.REWARD, kl_estimator=KLEstimator.K2, kl_coefficient=0.05
            ),
            loss=loss(),
            verl={"estimator": "reinforce_plus_plus", "kl_reward": ["k2", 0.05], "actor": actor()},
        ),
        Case(
            name="PPO with a critic: GAE, whitening, K1 in the reward, value clip, dual clip",
            rule=rule(
                gae,
                gamma=0.99,
                lambda_=0.95,
                whiten=True,
                kl_placement=KLPlacement.REWARD,
                kl_estimator=KLEstimator.K1,
                kl_coefficient=0.05,
            ),
            loss=loss(PPOLoss(clipLow=0.2, clipHigh=0.2, dualClip=3.0)),
            value=ValueLossConfig(value_clip=0.2),
            verl={
                "estimator": "gae",
                "gamma": 0.99,
                "lam": 0.95,
                "kl_reward": ["k1", 0.05],
                "actor": actor(clip_ratio_c=3.0),
                "value_clip": 0.2,
            },
        ),
    ]


def _advantages() -> list[Case]:
    """Estimators by themselves, with every KL in the reward."""
    estimator = AdvantageEstimator
    found = [
        Case(name="advantages: GRPO", rule=rule(estimator.GRPO), verl={"estimator": "grpo"}),
        Case(
            name="advantages: GRPO, same through verl's vectorized code", rule=rule(estimator.GRPO), verl={"estimator": "grpo_vectorized"}
        ),
        Case(
            name="advantages: RLOO",
            rule=rule(estimator.RLOO),
            verl={"estimator": "rloo"},
            trl={"trainer": "rloo", "estimator": True, "loss": False},
            batches=tuple(batch for batch in SHARED if batch != "holes"),  # TRL's RLOO knows no tools
        ),
        Case(
            name="advantages: RLOO, K1 in the reward",
            rule=rule(estimator.RLOO, kl_placement=KLPlacement.REWARD, kl_estimator=KLEstimator.K1, kl_coefficient=0.1),
            trl={"trainer": "rloo", "estimator": True, "loss": False, "beta": 0.1},
            batches=("plain", "on-policy", "extreme", "short"),
        ),
        Case(
            name="advantages: Reinforce, group baseline, whitened",
            rule=rule(estimator.GRPO, normalize_std=False, whiten=True),
            verl={"estimator": "reinforce_plus_plus_baseline"},
        ),
        Case(
            name="advantages: REINFORCE++ with gamma 0.95",
            rule=rule(estimator.REINFORCE_PLUS_PLUS, gamma=0.95),
            verl={"estimator": "reinforce_plus_plus", "gamma": 0.95},
        ),
    ]
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0)):
        found.append(
            Case(
                name=f"advantages and returns: GAE, gamma {gamma}, lambda {lam}, whitened",
                rule=rule(estimator.GAE, gamma=gamma, lambda_=lam, whiten=True),
                verl={"estimator": "gae", "gamma": gamma, "lam": lam},
            )
        )
    for kind, name in KL_NAMES.items():
        found.append(
            Case(
                name=f"advantages: GRPO, {kind} in the reward",
                rule=rule(estimator.GRPO, kl_placement=KLPlacement.REWARD, kl_estimator=kind, kl_coefficient=0.1),
                verl={"estimator": "grpo", "kl_reward": [name, 0.1]},
            )
        )
    return found


def _losses() -> list[Case]:
    """Policy losses with given advantages, token mean."""
    dual = PPOLoss(clipLow=0.2, clipHigh=0.28, dualClip=3.0)
    bypass = {"loss_mode": "bypass_mode", "rollout_correction": {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": None}}
    return [
        Case(name="PPO", loss=loss(), verl={"actor": actor()}, trl={"loss_type": "dapo"}),
        Case(
            name="PPO, old policy of the engine",
            loss=loss(proximal=ProximalPolicy.BEHAVIOR),
            verl={"old": "behavior", "actor": actor(policy_loss=bypass)},
            trl={"loss_type": "dapo", "old": "behavior"},
        ),
        Case(
            name="PPO with clip-higher and dual clip",
            loss=loss(dual),
            verl={"actor": actor(clip_ratio_high=0.28, clip_ratio_c=3.0)},
            trl={"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0},
        ),
        Case(name="Vanilla", loss=loss(VanillaLoss()), verl={"actor": actor(policy_loss={"loss_mode": "gpg"})}),
        Case(
            name="CISPO, both bounds",
            loss=loss(CISPOLoss(clipLow=0.3, clipHigh=0.5)),
            verl={"actor": actor(clip_ratio_low=0.3, clip_ratio_high=0.5, policy_loss={"loss_mode": "cispo"})},
        ),
        Case(
            name="CISPO, upper bound only",
            loss=loss(CISPOLoss(clipLow=1.0, clipHigh=4.0)),
            verl={"actor": actor(clip_ratio_low=1.0, clip_ratio_high=4.0, policy_loss={"loss_mode": "cispo"})},
            trl={"loss_type": "cispo", "epsilon_high": 5.0},
        ),
        Case(
            name="GSPO, advantages by token, token mean",
            loss=loss(GSPO),
            verl={"actor": actor(policy_loss={"loss_mode": "gspo"}, **GSPO_BOUNDS)},
        ),
        Case(
            name="GSPO, sequence mean of token sums (TRL's luspo)",
            loss=loss(GSPO, aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM),
            given="sequence",
            verl={"actor": actor(loss_agg_mode="seq-mean-token-sum", policy_loss={"loss_mode": "gspo"}, **GSPO_BOUNDS)},
            trl={"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
            batches=WITHOUT_MASKED,
        ),
        Case(
            name="PPO with an entropy bonus",
            loss=loss(entropy_coefficient=0.01),
            verl={"actor": actor(entropy_coeff=0.01)},
            trl={"loss_type": "dapo", "entropy_coef": 0.01},
        ),
    ]


def _aggregations() -> list[Case]:
    """Every aggregation, with a KL term and an entropy bonus, which it applies to as well."""
    found = []
    for aggregation, (verl, trl) in AGGREGATIONS.items():
        norm = TOKENS if aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else None
        common = {"aggregation": aggregation, "norm_tokens": norm, "kl_coefficient": 0.05}
        verl_actor = actor(loss_agg_mode=verl, loss_scale_factor=norm, use_kl_loss=True, kl_loss_coef=0.05)
        found.append(
            Case(
                name=f"{aggregation} of PPO and K3",
                loss=loss(**common),
                verl={"actor": verl_actor},
                trl={"loss_type": trl, "beta": 0.05},
                batches=SHARED if aggregation is Aggregation.TOKEN_MEAN else WITHOUT_MASKED,
            )
        )
        found.append(
            Case(
                name=f"{aggregation} of PPO, K3 and entropy, responses without trained tokens included",
                loss=loss(**common, entropy_coefficient=0.01),
                verl={"actor": {**verl_actor, "entropy_coeff": 0.01}},
            )
        )
    return found


def _kl() -> list[Case]:
    """Every KL estimator as a term of the loss."""
    return [
        Case(
            name=f"{kind} in the loss",
            loss=loss(kl_coefficient=0.1, kl_estimator=kind),
            verl={"actor": actor(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=name)},
            trl={"loss_type": "dapo", "beta": 0.1} if kind is KLEstimator.K3 else None,
        )
        for kind, name in KL_NAMES.items()
    ]


def _corrections() -> list[Case]:
    """Weights and masks for the distance between the trainer at the beginning of the step and the engine."""
    token, sequence = CorrectionLevel.TOKEN, CorrectionLevel.SEQUENCE
    found = []
    for level, name in ((token, "token"), (sequence, "sequence")):
        weight = CorrectionWeightConfig(level=level, low=0.0, high=2.0)
        inside = CorrectionMaskConfig(level=level, low=0.5, high=5.0)
        found += [
            Case(
                name=f"truncated importance sampling, {name}, at most 2",
                loss=loss(weight=weight),
                verl={"correction": {"rollout_is": name, "rollout_is_threshold": 2.0}, "actor": actor()},
                trl={"loss_type": "dapo", "mode": f"{name}_truncate", "high": 2.0},
            ),
            Case(
                name=f"weights of {name}s inside [0.5, 5], the others 0 (IcePop)",
                loss=loss(weight=CorrectionWeightConfig(level=level, low=0.0, high=NEVER), masks=(inside,)),
                verl={"correction": {"rollout_is": name, "rollout_is_threshold": "0.5_5.0"}, "actor": actor()},
                trl={"loss_type": "dapo", "mode": f"{name}_mask", "low": 0.5, "high": 5.0},
            ),
            Case(
                name=f"REINFORCE with truncated importance sampling of the current policy, {name}",
                loss=loss(VanillaLoss(), proximal=ProximalPolicy.BEHAVIOR, weight=weight, aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM),
                verl={
                    "old": "behavior",
                    "actor": actor(
                        loss_agg_mode="seq-mean-token-sum",
                        policy_loss={
                            "loss_mode": "bypass_mode",
                            "rollout_correction": {
                                "bypass_mode": True,
                                "loss_type": "reinforce",
                                "rollout_is": name,
                                "rollout_is_threshold": 2.0,
                            },
                        },
                    ),
                },
            ),
        ]
    found.append(
        Case(
            name="GSPO with truncated importance sampling, token",
            loss=loss(GSPO, weight=CorrectionWeightConfig(level=token, low=0.0, high=2.0)),
            verl={
                "correction": {"rollout_is": "token", "rollout_is_threshold": 2.0},
                "actor": actor(policy_loss={"loss_mode": "gspo"}, **GSPO_BOUNDS),
            },
        )
    )
    return found


def _values() -> list[Case]:
    """The critic's loss."""
    return [
        Case(name="value loss", value=ValueLossConfig(value_clip=None), verl={"value_clip": NEVER}),
        Case(name="value loss with value clip 0.2", value=ValueLossConfig(value_clip=0.2), verl={"value_clip": 0.2}),
    ]


def _heads() -> list[Case]:
    """From logits to log-probs and entropies."""
    return [
        Case(
            name=f"log-probs and entropy of logits at temperature {temperature}",
            head_temperature=temperature,
            verl={"head": temperature},
            trl={"head": temperature, "loss": False},
        )
        for temperature in (1.0, 0.7)
    ]
