"""The registry of metric names: the one list of which metrics exist, in which unit, and what they mean.

A metric that is not here cannot be written (``MetricsWriter`` raises), so that the reference page rendered by
``markdown_table`` is always the whole truth. A name is ``group/name``; a name that ends in ``/*`` is a family whose last
segment is chosen by the spec (a reward's name, a data source's name). A ``*`` may stand in the middle as well; it takes slashes.

Units: ``s`` seconds, ``bytes``, ``tokens``, ``1`` plain numbers, ``fraction`` 0 to 1, ``nats`` natural-log units.
Reading ``markdown_table()`` is reading this file; nothing else in the runtime spells units.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

PHASES: tuple[str, ...] = ("generate", "reward", "score", "train", "sync", "checkpoint")
"""Phases of a step in display order; each has a metric ``time/<phase>_s``."""

DRIVER_LANE = "driver"
"""Timeline lane of the start-up and closing phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """What a reader needs to know about one metric."""

    name: str
    """``group/name``; in a family one part is ``*``."""
    unit: str
    meaning: str
    """One sentence without a full stop."""


class UnknownMetricError(ValueError):
    """Raised when code writes a metric that the registry does not list; a defect of the runtime, not of a spec."""


_TABLE: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "1", "mean score of the step's trajectories; failed rewards are excluded"),
    ("reward/std", "1", "standard deviation of the scores over the step's trajectories"),
    ("reward/min", "1", "lowest score of the step"),
    ("reward/max", "1", "highest score of the step"),
    ("reward/pass_rate", "fraction", "share of trajectories that reached the pass threshold"),
    ("reward/group_std_mean", "1", "mean over prompts of the score's standard deviation within the group"),
    ("reward/uniform_groups_fraction", "fraction", "share of groups whose scores are all equal, which have no gradient"),
    ("reward/errors", "1", "evaluations of a reward that raised, returned no number, or lost their process"),
    ("reward/errors/*", "1", "the same for the reward of that name"),
    ("reward/timeouts", "1", "evaluations of a reward that timed out twice"),
    ("reward/timeouts/*", "1", "the same for the reward of that name"),
    ("reward/retries", "1", "evaluations retried in a new process after a timeout"),
    ("reward/dropped", "1", "trajectories excluded because a reward failed and no score is configured for failures"),
    ("judge/questions/*", "1", "training responses sent to the judge of the reward of that name"),
    ("judge/calls/*", "1", "requests sent for them, retries included"),
    ("judge/failures/*", "1", "questions without an answer: retries exhausted, refused, empty, or beyond the budget"),
    ("judge/remembered/*", "1", "questions answered from the cache of earlier answers"),
    ("judge/prompt_tokens/*", "tokens", "tokens of the questions as the endpoint counts them, answered ones only"),
    ("judge/completion_tokens/*", "tokens", "tokens of the answers as the endpoint counts them"),
    ("judge/answer_mean_s/*", "s", "mean time from a question to its answer, including waits for rate limits and retries"),
    ("reward/shaped_mean", "1", "mean score after shaping, from which advantages are computed"),
    ("reward/clip_fraction", "fraction", "share of scores clipped by algorithm.reward.clip"),
    ("reward/overlong_penalty_mean", "1", "mean over trajectories of the penalty for long responses"),
    ("reward/part/*", "1", "mean unweighted score of the reward function of that name"),
    ("reward/source/*", "1", "mean score of the prompts of the data source of that name"),
    ("reward/tag/*", "1", "mean score of the prompts of that tag"),
    ("reward/tag_pass_rate/*", "fraction", "share of trajectories of that tag that reached the pass threshold"),
    ("response/mean_tokens", "tokens", "mean response length, including the end-of-sequence token"),
    ("response/min_tokens", "tokens", "shortest response"),
    ("response/max_tokens", "tokens", "longest response"),
    ("response/truncated_fraction", "fraction", "share of responses truncated at the token limit"),
    ("prompt/mean_tokens", "tokens", "mean prompt length"),
    ("rollout/tokens", "tokens", "response tokens of the trajectories trained in the step"),
    ("rollout/sequences", "1", "trajectories trained in the step"),
    ("rollout/tokens_per_s", "tokens/s", "response tokens of the step, without recovered groups, per second of wall time"),
    ("rollout/groups_accepted", "1", "prompt groups accepted for the step"),
    ("rollout/groups_recovered", "1", "prompt groups of the step that an earlier attempt had finished; present only if there are any"),
    ("rollout/groups_dropped", "1", "prompt groups dropped in the step, for any reason"),
    (
        "rollout/requests_moved",
        "1",
        "unfinished responses of engines that released their devices or were lost; they continued on another engine or later",
    ),
    ("rollout/tokens_kept", "tokens", "tokens of those responses, which are not sampled again"),
    ("rollout/groups_filtered", "1", "prompt groups rejected by a filter in the step and replaced by others"),
    ("rollout/groups_cancelled", "1", "prompt groups canceled while their responses were being generated"),
    ("rollout/requests_cancelled", "1", "unfinished responses that were aborted"),
    ("rollout/tokens_cancelled", "tokens", "tokens of those responses, which were sampled but not used"),
    (
        "rollout/history_tokens_kept",
        "tokens",
        "cached tokens of an episode's earlier turns, or of a response's earlier part, that were reused on the same engine",
    ),
    ("rollout/history_tokens_moved", "tokens", "the same, on another engine, which computed them again"),
    ("rollout/engines_lost", "1", "engines that ended, failed, or made no progress; their responses continued on another engine or later"),
    ("rollout/requests_running", "1", "requests running on engines when the step ended"),
    ("rollout/requests_waiting", "1", "requests queued for an engine when the step ended"),
    ("engine/replaced", "1", "lost engines replaced by a new process in the step; present only if there were any"),
    ("engine/replacement_s", "s", "longest time from the loss of an engine until its replacement served the newest weights"),
    ("environment/replaced", "1", "lost environment workers replaced by a new process in the step; present only if there were any"),
    ("environment/replacement_s", "s", "longest time from the loss of an environment worker until its replacement accepted episodes"),
    ("rollout/logprob_mean", "nats", "mean behavior log-probability of the response tokens"),
    (
        "rollout/possible_tokens_mean",
        "tokens",
        "with topP, topK, or minP: number of tokens that could have been sampled, mean over response tokens",
    ),
    ("rollout/possible_tokens_max", "tokens", "maximum of the same number"),
    (
        "rollout/possible_unknown_fraction",
        "fraction",
        "share of response tokens excluded from training because ties in the logits made the set larger than vLLM reports",
    ),
    ("rollout/mask_bytes", "bytes", "size of the step's sampling masks, which are sent to the trainer"),
    (
        "rollout/route_bytes",
        "bytes",
        "size of the expert routes of the step's samples, which are sent to the trainer with routerReplay: Engine",
    ),
    (
        "episode/success",
        "fraction",
        "share of the step's episodes that succeeded: as reported by the environment, otherwise a reward above 0",
    ),
    ("episode/turns_mean", "1", "mean number of actions of an episode"),
    ("episode/turns_max", "1", "maximum of the same number"),
    ("episode/tokens_mean", "tokens", "mean length of an episode after its first prompt, including observations"),
    ("episode/environment_s", "s", "mean time per episode during which the driver waited for its environment"),
    ("episode/invalid_actions_fraction", "fraction", "share of actions that their environment rejected as invalid"),
    ("episode/errors", "1", "episodes that ended because their environment raised, hung, or died twice, or its worker was lost twice"),
    ("episode/errors/*", "1", "the same for the environment of that name"),
    ("episode/timeouts", "1", "episodes that exceeded environments[].episodeTimeoutSeconds"),
    ("episode/timeouts/*", "1", "the same for the environment of that name"),
    ("episode/restarts", "1", "episodes restarted because their environment worker was lost"),
    ("episode/cancelled", "1", "episodes canceled before their end: too stale, or no longer needed"),
    ("episode/stopped/*", "fraction", "share of the step's episodes that ended for that reason: done, maxTurns, maxTokens, timeout, error"),
    (
        "episode/info/*",
        "1",
        "mean over episodes of a number reported by the environment of that name, such as lake/success; of a Harness also calls, "
        "refused_calls, and samples: 1 if every call continued the same conversation",
    ),
    ("staleness/mean", "versions", "mean over trained tokens of the trainer's version minus the version that sampled them"),
    ("staleness/max", "versions", "maximum of the same difference; never above the declared bound"),
    ("staleness/histogram/*", "fraction", "share of trained tokens sampled that many versions before the trainer's"),
    ("overlap/trainer_idle_fraction", "fraction", "part of the step's wall time in which the trainer waited for a batch"),
    (
        "overlap/engine_busy_fraction",
        "fraction",
        "share of request slots in use, mean over engines and the step's wall time",
    ),
    ("sync/version", "1", "weight version that all engines confirmed after the step"),
    ("sync/bytes", "bytes", "bytes of weights received by the engines, as sent, summed over engines"),
    (
        "sync/stall_s",
        "s",
        "part of time/sync_s during which engines could not generate: all of it with updateMode: Drain, otherwise while they load",
    ),
    ("sync/hidden_s", "s", "the rest of the sync, during which engines generated"),
    ("sync/load_s", "s", "time during which the slowest engine's model was partly updated, from its first bucket to the end of the sync"),
    ("sync/resent", "1", "syncs of the step that were sent again because of a wrong checksum or a broken connection"),
    ("sync/fell_back", "1", "1 if weights go through the object store because the chosen transport failed its self-test, otherwise 0"),
    (
        "sync/reloaded_fraction",
        "fraction",
        "with weightSync.delta, share of the model's tensors that vLLM loads again where something in them changed, because their load is "
        "no plain copy; of the worst engine, whose log names the parameters",
    ),
    (
        "sync/probe_mean_abs_diff",
        "nats",
        "mean difference between the log-probs of trainer and engine in a probe, of the worst engine; limited by spec.weightSync.probe",
    ),
    ("sync/probe_p95_abs_diff", "nats", "95th percentile of the same differences; limited by spec.weightSync.probe"),
    (
        "sync/probe_max_abs_diff",
        "nats",
        "largest of the same differences, under the weights that sampled the step's responses",
    ),
    ("time/step_s", "s", "wall time of the step, from the end of the previous step"),
    ("time/generate_s", "s", "time during which the step waited for engines to generate"),
    ("time/reward_s", "s", "time during which the step waited for rewards"),
    ("time/score_s", "s", "time of forward passes that only score the batch: reference, proximal policy, and critic"),
    ("time/train_s", "s", "time of forward and backward passes and optimizer updates"),
    ("time/forward_backward_s", "s", "part of time/train_s: forward and backward passes of rank 0"),
    ("time/optimizer_s", "s", "part of time/train_s: gradient norm and optimizer of rank 0"),
    (
        "time/optimizer_load_s",
        "s",
        "part of time/optimizer_s: loading AdamW's states onto the device, if they are there only for the update",
    ),
    ("time/optimizer_offload_s", "s", "part of time/optimizer_s: offloading AdamW's states again"),
    ("time/sync_s", "s", "time of publishing weights to the engines; the probe runs in parallel with training"),
    ("time/offload_s", "s", "time during which state was offloaded from devices; may overlap other work"),
    ("time/load_s", "s", "time during which state was loaded onto devices; may overlap time/offload_s"),
    ("time/engine_pause_s", "s", "time until engines on the trainer's devices had returned their unfinished responses"),
    ("time/*/load_s", "s", "time of loading what a `state_offload_manager` block of that name needs"),
    ("time/*/execute_s", "s", "time of the block itself"),
    ("time/*/offload_s", "s", "time of offloading before and after the block"),
    ("time/validate_s", "s", "time of a validation, including its rewards; most of it runs in parallel with training"),
    ("time/checkpoint_s", "s", "time of writing a checkpoint; 0 in most steps"),
    ("offload/bytes", "bytes", "bytes copied between devices and host memory, in both directions, summed over workers"),
    ("offload/gb_per_s", "GB/s", "those bytes, in 10^9, divided by the seconds of all switches"),
    ("offload/waits_s", "s", "time spent waiting for devices that other components held, summed over requests"),
    ("offload/*/load_bytes", "bytes", "bytes copied to the device for a `state_offload_manager` block of that name"),
    ("offload/*/load_gb_per_s", "GB/s", "those bytes, in 10^9, divided by the seconds of the load"),
    ("offload/*/offload_bytes", "bytes", "bytes copied to host memory before and after the block"),
    ("offload/*/offload_gb_per_s", "GB/s", "those bytes, in 10^9, divided by the seconds of the offloads"),
    ("memory/device_peak_bytes", "bytes", "peak memory of tensors on the device of a worker that switched"),
    ("memory/host_rss_bytes", "bytes", "peak resident memory of the process of a worker that switched"),
    ("memory/pinned_bytes", "bytes", "peak host memory that a worker kept for offloaded state"),
    (
        "memory/*/allocated_bytes",
        "bytes",
        "tensors on the device at a point of a `state_offload_manager` block (start, loaded, executed, end), such as `score/loaded`",
    ),
    ("memory/*/reserved_bytes", "bytes", "memory held by the device's allocator at that point"),
    ("memory/*/peak_bytes", "bytes", "peak memory of tensors since the previous point"),
    ("memory/*/host_rss_bytes", "bytes", "resident memory of the process at that point"),
    ("memory/*/pinned_bytes", "bytes", "host memory kept for offloaded state at that point"),
    ("train/policy_loss", "1", "policy loss without the KL and entropy terms"),
    ("train/kl_loss", "1", "KL-to-reference term before its coefficient"),
    ("train/total_loss", "1", "total loss, of which gradients are computed"),
    ("train/grad_norm", "1", "global gradient norm before clipping"),
    ("train/learning_rate", "1", "learning rate of the update"),
    ("train/entropy_from_behavior", "nats", "entropy estimate per response token: minus the mean behavior log-probability"),
    ("train/micro_batches", "1", "forward and backward passes of rank 0 in the step"),
    ("train/entropy", "nats", "mean entropy of the policy's full distribution at the trained tokens; present with an entropy bonus"),
    (
        "train/ratio_mean",
        "1",
        "mean probability ratio in the loss: policy to behavior or proximal policy; per sequence with GSPO",
    ),
    ("train/ratio_std", "1", "standard deviation of that ratio over trained tokens"),
    ("train/ratio_max", "1", "maximum of that ratio"),
    ("train/ratio_min", "1", "minimum of that ratio"),
    ("train/clip_fraction", "fraction", "share of response tokens whose ratio was clipped"),
    ("train/clip_low_fraction", "fraction", "part of train/clip_fraction with a ratio below 1"),
    ("train/clip_high_fraction", "fraction", "part of train/clip_fraction with a ratio above 1"),
    ("train/correction_weight_mean", "1", "mean off-policy weight of the trained tokens, before masks"),
    ("train/correction_weight_clipped_fraction", "fraction", "share of trained tokens whose off-policy weight is at one of its bounds"),
    ("train/correction_masked_fraction", "fraction", "share of trained tokens excluded by an off-policy mask"),
    (
        "train/effective_sample_size",
        "fraction",
        "effective sample size of the off-policy factors that were used, including masks, divided by their number",
    ),
    ("train/masked_samples_fraction", "fraction", "share of responses that were scored but not trained"),
    ("train/kl_coefficient", "1", "coefficient of the KL to the reference in the step"),
    ("train/kl_reward_mean", "nats", "mean KL to the reference per token that was subtracted from rewards, before its coefficient"),
    (
        "distillation/kl",
        "nats",
        "mean of log(policy) - log(teacher) over sampled tokens: the KL from the policy to the teacher per token",
    ),
    ("distillation/loss", "1", "term of the loss for the distance to the teacher, before its coefficient"),
    ("train/load_balancing_loss", "1", "load-balancing loss of a mixture's routers, before its coefficient"),
    ("train/expert_load_max", "1", "tokens of a mixture's busiest expert divided by the mean over all experts; 1 is perfectly balanced"),
    (
        "train/layer_expert_load_max",
        "1",
        "tokens of the busiest expert of a layer divided by the mean of its experts, mean over the layers; with routerBiasUpdateRate",
    ),
    ("train/router_bias_max", "1", "largest absolute correction bias of a router; with routerBiasUpdateRate"),
    ("train/skipped_updates", "1", "policy updates skipped because no token was left to train"),
    ("train/tokens", "tokens", "prompt and response tokens processed by the trainer"),
    ("advantage/mean", "1", "mean advantage of the trained tokens"),
    ("advantage/std", "1", "standard deviation of the advantages of the trained tokens"),
    ("advantage/min", "1", "lowest advantage of a trained token"),
    ("advantage/max", "1", "highest advantage of a trained token"),
    ("advantage/clip_fraction", "fraction", "share of trained tokens whose advantage was clipped by algorithm.advantage.clip"),
    ("critic/loss", "1", "value loss, half the squared error, mean over trained tokens"),
    ("critic/value_mean", "1", "mean value of the trained tokens at the start of the step"),
    ("critic/return_mean", "1", "mean return of the trained tokens, the target of the values"),
    (
        "critic/explained_variance",
        "1",
        "1 minus the variance of (return - value) divided by the variance of the return; 1 is perfect, 0 is no better than a constant",
    ),
    ("critic/clip_fraction", "fraction", "share of trained tokens whose value was clipped"),
    ("critic/grad_norm", "1", "global norm of the critic's gradient before clipping"),
    ("critic/learning_rate", "1", "learning rate of the critic's update"),
    ("mismatch/kl_k1", "nats", "mean of log(behavior) - log(trainer) over response tokens, the k1 estimator"),
    ("mismatch/kl_k3", "nats", "mean of r - 1 - log r with r = trainer/behavior, the non-negative k3 estimator"),
    ("mismatch/max_abs_logprob_diff", "nats", "largest difference between trainer and engine in the log-prob of a token"),
    ("mismatch/effective_sample_size", "fraction", "effective sample size of the importance weights divided by their number"),
    ("validation/mean", "1", "mean score of the validation responses"),
    ("validation/pass_rate", "fraction", "share of validation responses that reached the pass threshold"),
    ("validation/mean_tokens", "tokens", "mean length of the validation responses"),
    ("validation/truncated_fraction", "fraction", "share of validation responses truncated at the token limit"),
    ("validation/prompts", "1", "validation prompts that were answered"),
    ("validation/version", "1", "weight version that generated the validation responses"),
    ("validation/tokens", "tokens", "response tokens generated for validation"),
    ("validation/errors", "1", "validation responses excluded from the means because a reward failed or timed out"),
    ("validation/turns_mean", "1", "mean number of actions of a validation episode"),
    ("validation/turns_max", "1", "maximum of the same number"),
    ("validation/environment_s", "s", "mean time of a validation episode in which the driver waited for its environment"),
    ("validation/invalid_actions_fraction", "fraction", "share of its actions that the environment rejected as invalid"),
    ("validation/stopped/*", "fraction", "share of the validation episodes that ended for that reason, as episode/stopped"),
    ("validation/info/*", "1", "mean over validation episodes of a number reported by the environment of that name"),
    ("validation/tag/*", "1", "mean score of validation responses to prompts of that tag"),
    ("validation/part/*", "1", "mean unweighted score of the reward function of that name over validation responses"),
    ("validation/source/*", "1", "mean score of the validation prompts of the data source of that name"),
)

METRICS: Mapping[str, MetricInfo] = MappingProxyType({n: MetricInfo(name=n, unit=u, meaning=m) for n, u, m in _TABLE})
"""Every metric by name, in reference order."""

_FAMILIES: tuple[tuple[str, str, MetricInfo], ...] = tuple(
    (name.partition("*")[0], name.partition("*")[2], info) for name, info in METRICS.items() if "*" in name
)
"""(what comes before the part that is free, what comes after it, entry)."""

GROUP_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "reward": "Rewards",
        "judge": "Judges",
        "response": "Responses",
        "prompt": "Prompts",
        "rollout": "Rollout",
        "engine": "Engines",
        "environment": "Environment workers",
        "episode": "Episodes",
        "staleness": "Staleness",
        "overlap": "Overlap of rollout and training",
        "sync": "Weight sync",
        "time": "Time",
        "offload": "Time-division",
        "memory": "Memory",
        "train": "Training",
        "advantage": "Advantages",
        "critic": "Critic",
        "distillation": "Distillation",
        "mismatch": "Trainer against engine",
        "validation": "Validation",
    }
)
"""Heading of each group on the reference page."""


def describe(name: str) -> MetricInfo:
    """Return the entry of a metric, or of the family it belongs to.

    Raises:
        UnknownMetricError: the name is not registered; the message proposes the nearest names.
    """
    info = METRICS.get(name)
    if info is not None and "*" not in name:
        return info
    for head, tail, family in _FAMILIES:
        middle = name[len(head) : len(name) - len(tail)]
        if name.startswith(head) and name.endswith(tail) and middle not in ("", "*"):
            return family
    near = difflib.get_close_matches(name, METRICS, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UnknownMetricError(f"metric {name!r} is not registered{hint} Register it in report/names.py with unit and meaning")


def require_registered(names: Iterable[str]) -> None:
    """Check every name once.

    Raises:
        UnknownMetricError: for the first name that is not registered.
    """
    for name in names:
        describe(name)


def markdown_table() -> str:
    """Render the registry as markdown, one section a group; the body of ``docs/reference/metrics.md``."""
    lines: list[str] = []
    for group, title in GROUP_TITLES.items():
        lines += [f"## {title}", "", "| metric | unit | meaning |", "|---|---|---|"]
        for info in METRICS.values():
            if info.name.partition("/")[0] == group:
                name = info.name.replace("/*", "/<name>")
                lines.append(f"| `{name}` | {info.unit} | {info.meaning} |")
        lines.append("")
    return "\n".join(lines)
