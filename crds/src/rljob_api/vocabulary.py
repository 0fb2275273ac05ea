"""Words that spec, operator and runtime share: enums without pydantic, so that a judging process starts in a twentieth of a second.

The spec's models use them for fields, the runtime's own small configurations for the same settings, errors for their reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class RewardType(StrEnum):
    """How a response is judged."""

    TASK = "Task"
    """The reasoning-gym task's own score_answer against its entry; for prompts of reasoning-gym sources."""
    EXACT_MATCH = "ExactMatch"
    """1 when the text equals the reference answer, else 0; surrounding white space does not count."""
    MATH_VERIFY = "MathVerify"
    """1 when math-verify finds the mathematical value equal to the reference answer's, else 0."""
    MATH_RULE = "MathRule"
    """As MathVerify, of what follows </think>: the last \\boxed{...} there, else the first value found; what cannot be read scores 0."""
    MULTIPLE_CHOICE = "MultipleChoice"
    """1 when the first capital letter of the last \\boxed{...} is that of the reference answer, else 0."""
    IF_EVAL = "IFEval"
    """1 when the response follows the instruction that the reference answer or the entry names, else 0."""
    CODE = "Code"
    """1 when the code in the response passes the tests of the entry, else 0; it runs in a process with strict limits."""
    FUNCTION = "Function"
    """A user's function."""
    LLM_JUDGE = "LLMJudge"
    """What a language model says about the response, see judge."""
    REWARD_MODEL = "RewardModel"
    """What a sequence-classification model scores the response, see rewardModel."""


class GradientReduction(StrEnum):
    """When data-parallel processes of a trainer add up their gradients."""

    AUTO = "Auto"
    """EachMicroBatch if deviceMemory is known and whole gradients do not fit by the memory estimate, otherwise LastMicroBatch."""
    LAST_MICRO_BATCH = "LastMicroBatch"
    """Once per update. Until then each process holds whole float32 gradients: 4 bytes per parameter, divided by tensorParallelSize."""
    EACH_MICRO_BATCH = "EachMicroBatch"
    """With every micro-batch. Each process holds only its share of the gradients; twice the traffic with several micro-batches."""


class OptimizerStateDType(StrEnum):
    """Floating-point type in which AdamW's two moments are kept; they are computed in float32 either way."""

    FLOAT32 = "float32"
    """8 bytes for each trained parameter."""
    BFLOAT16 = "bfloat16"
    """4 bytes for each trained parameter. Rounded stochastically: rounding to the nearest value would lose small changes."""


class LayerCompilation(StrEnum):
    """Whether the trainer's decoder layers go through torch.compile."""

    AUTO = "Auto"
    """On GPUs, for dense Transformers models with more than 8 million parameters and tensorParallelSize 1."""
    ENABLED = "Enabled"
    """Also on CPUs, where the first step waits for a C++ compiler."""
    DISABLED = "Disabled"
    """No compilation."""


class RouterReplay(StrEnum):
    """Whose choice of experts the trainer's forward passes use."""

    DISABLED = "Disabled"
    """Its own routers'."""
    ENGINE = "Engine"
    """Those of the engine that sampled the response, token by token; weights of the chosen experts are the trainer's own."""


class BudgetEnd(StrEnum):
    """What happens when a judge's budget is spent."""

    FAIL = "Fail"
    """The job fails."""
    ON_ERROR = "OnError"
    """All further samples are handled according to the reward's onError."""


class EnvironmentType(StrEnum):
    """Built-in environments."""

    FROZEN_LAKE = "FrozenLake"
    """Cross a frozen lake on a grid without falling into a hole."""
    SOKOBAN = "Sokoban"
    """Push boxes onto targets."""
    REASONING_GYM = "ReasoningGym"
    """Answer a question of a reasoning-gym task."""
    TOOL_USE = "ToolUse"
    """Answer a question with the help of tools."""
    CHAT = "Chat"
    """Talk with a user over several turns."""
    HARNESS = "Harness"
    """A program of your own that calls the policy through an OpenAI-compatible endpoint."""


class HarnessSampling(StrEnum):
    """What happens to a program's call that asks for different sampling than the job's."""

    REFUSE = "Refuse"
    """It is rejected with an error that names both values."""
    JOB = "Job"
    """It is sampled with the job's own values, whatever it asks for."""


class ToolType(StrEnum):
    """Tools of the environment ToolUse."""

    PYTHON = "Python"
    """Runs a program without network and returns what it prints."""
    CALCULATOR = "Calculator"
    """Evaluates an arithmetic expression."""
    SEARCH = "Search"
    """Finds passages of a corpus by their words (BM25)."""
    FUNCTION = "Function"
    """A user's function."""


class CallFormat(StrEnum):
    """How a policy calls tools."""

    TOOL_CALL = "ToolCall"
    """A JSON object with name and arguments within <tool_call> tags, as the templates of Hermes and Qwen have it."""
    TAGS = "Tags"
    """The one argument within tags of the tool's name, such as <python>print(1)</python>."""


class PromptHistory(StrEnum):
    """What the policy sees of earlier turns of an episode."""

    KEEP = "Keep"
    """Everything, token by token: each turn is appended. An episode is one sample."""
    TURN = "Turn"
    """Each turn is a prompt of its own, and a sample of its own."""


class PromptMemory(StrEnum):
    """What the prompt of a turn shows of the turns before it."""

    TURNS = "Turns"
    """Observation, action and reward of each."""
    INVALID_TURNS = "InvalidTurns"
    """The same of those whose action was not understood, as ROLL's StepEnvManager."""
    OBSERVATIONS = "Observations"
    """The observation of each, in lines, as ROLL's StepConcatEnvManager."""


class EpisodeCount(StrEnum):
    """How often an episode counts in the mean and deviation of the episode scores of its group."""

    ONCE = "Once"
    """Once, regardless of its length, as in the paper."""
    PER_TURN = "PerTurn"
    """Once for each of its turns, as in ROLL: long episodes count more."""


class Extraction(StrEnum):
    """Which part of the response is judged; a response without it scores 0."""

    WHOLE = "Whole"
    """Everything, surrounding white space removed."""
    LAST_LINE = "LastLine"
    """The last line that is not blank."""
    BOXED = "Boxed"
    """What the last \\boxed{...} holds."""
    TAG = "Tag"
    """What the last <answer>...</answer> holds."""
    LAST_NUMBER = "LastNumber"
    """The last number; thousands commas are removed."""


DROP = "Drop"
"""Instead of a score for a reward that failed: leave the sample out."""

REWARD_PARAMETERS: Mapping[RewardType, Mapping[str, tuple[type, ...]]] = {
    RewardType.TASK: {},
    RewardType.EXACT_MATCH: {"ignore_case": (bool,)},
    RewardType.MATH_VERIFY: {"float_rounding": (int,), "numeric_precision": (int,), "strict": (bool,)},
    RewardType.MATH_RULE: {"float_rounding": (int,), "numeric_precision": (int,), "strict": (bool,)},
    RewardType.MULTIPLE_CHOICE: {"require_boxed": (bool,)},
    RewardType.IF_EVAL: {"partial": (bool,)},
    RewardType.CODE: {
        "case_timeout_s": (int, float),
        "memory_bytes": (int,),
        "partial": (bool,),
        "tests_field": (str,),
        "kind_field": (str,),
        "function_field": (str,),
    },
}
"""Parameters of each built-in type; a Function takes whatever its signature allows."""


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "TokenMean"
    """Mean over all response tokens of the batch."""
    SEQ_MEAN_TOKEN_MEAN = "SeqMeanTokenMean"
    """Mean over sequences of their token means."""
    SEQ_MEAN_TOKEN_SUM = "SeqMeanTokenSum"
    """Mean over sequences of their token sums."""
    SEQ_MEAN_TOKEN_SUM_NORM = "SeqMeanTokenSumNorm"
    """Mean over sequences of their token sums divided by rollout.maxResponseTokens: Dr. GRPO with its constant length."""


class KLEstimator(StrEnum):
    """Estimator of KL(policy || reference) on sampled tokens (Schulman, "Approximating KL divergence")."""

    K1 = "K1"
    """Log ratio: unbiased, high variance."""
    K2 = "K2"
    """Half the squared log ratio: biased, low variance."""
    K3 = "K3"
    """Ratio minus 1 minus log ratio: unbiased, low variance."""
    ABS = "Abs"
    """Absolute log ratio: biased, never negative."""


class KLPlacement(StrEnum):
    """Where the distance to the reference, or to the teacher, counts."""

    LOSS = "Loss"
    """A term of the loss."""
    REWARD = "Reward"
    """Taken from each token's reward, before advantages are computed; that to the teacher from the advantages themselves."""


class AdvantageEstimator(StrEnum):
    """How rewards become advantages."""

    GRPO = "GRPO"
    """Reward minus the mean of its group, divided by the group's standard deviation."""
    RLOO = "RLOO"
    """Reward minus the mean of the others of its group."""
    GAE = "GAE"
    """Generalized advantage estimation with a critic."""
    REINFORCE = "Reinforce"
    """The discounted return itself."""
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"
    """The return, normalized over all trained tokens of the step."""
    GIGPO = "GiGPO"
    """GRPO over episodes plus groups of turns that start from the same state, arXiv 2505.10978; for agentic jobs."""
    STEP_REINFORCE = "StepReinforce"
    """The return from each turn of an episode on, normalized over turns as algorithm.reward has it; for agentic jobs."""
    CUSTOM = "Custom"
    """The user's own function."""


class NormScope(StrEnum):
    """Over which samples a statistic of rewards is taken."""

    GROUP = "Group"
    """The samples of one prompt."""
    BATCH = "Batch"
    """All samples of the step."""
    RUNNING = "Running"
    """All samples so far of the same data source."""


class CorrectionLevel(StrEnum):
    """How much of a response one importance ratio describes."""

    TOKEN = "Token"
    """Each token its own."""
    SEQUENCE = "Sequence"
    """The product over the response."""
    GEOMETRIC = "Geometric"
    """The geometric mean over the response."""
    SEGMENT = "Segment"
    """The geometric mean over a contiguous stretch of sampled tokens: a turn."""


class ProximalPolicy(StrEnum):
    """The old policy of the loss's ratio."""

    BEHAVIOR = "Behaviour"
    """The policy that sampled the tokens: the engines' own log-probs."""
    RECOMPUTE = "Recompute"
    """The trainer's policy at the beginning of the step: one additional forward pass."""
    INTERPOLATE = "Interpolate"
    """Between behavior policy and current policy; the older the token, the closer to the current one. No additional pass."""


class GroupRouting(StrEnum):
    """How the samples of one prompt are distributed over engines."""

    SPREAD = "Spread"
    """Each sample goes to the engine with the least to do."""
    TOGETHER = "Together"
    """All samples of a prompt go to one engine, which computes the prompt once, unless it has clearly more to do than others."""


class StandbyProcesses(StrEnum):
    """Where a process waits to become an engine in the place of a lost one."""

    AUTO = "Auto"
    """On nodes with accelerators if the loss of an engine stops all generation: a job's only engine, or engines on shared devices."""
    PER_NODE = "PerNode"
    """On every node with engines, one per component."""
    NEVER = "Never"
    """Nowhere: a lost engine is replaced by a new process."""


class Schedule(StrEnum):
    """Learning rate over the steps, after the warm-up."""

    CONSTANT = "Constant"
    """Stays at the peak."""
    LINEAR = "Linear"
    """Falls linearly to minLearningRate at the last step."""
    COSINE = "Cosine"
    """Falls along a half cosine to minLearningRate at the last step."""


class Reason(StrEnum):
    """Why a condition is as it is; one CamelCase word that tools may rely on."""

    PENDING = "Pending"
    """Not processed yet."""
    SPEC_VALID = "SpecValid"
    """Every check passed, and every process is placed."""
    SPEC_INVALID = "SpecInvalid"
    """A check failed; the message lists every problem with its path. No child exists."""
    SPEC_CHANGED = "SpecChanged"
    """An immutable field was changed where the API server cannot detect it; the message names it. No further attempt is made."""
    CHILD_REJECTED = "ChildRejected"
    """KubeRay or the API server refused the RayJob made from the spec; the message is theirs."""
    SUSPENDED = "Suspended"
    """spec.suspend is true."""
    NOT_SUSPENDED = "NotSuspended"
    """spec.suspend is false."""
    QUEUED = "Queued"
    """Waiting for quota in its queue, or preempted there."""
    STARTING = "Starting"
    """Nodes or workers of the current attempt are starting; the message counts them."""
    CHILD_NAME_TAKEN = "ChildNameTaken"
    """Another object already has the name of the RayJob to create; delete it or rename the RLJob."""
    UNSCHEDULABLE = "Unschedulable"
    """A pod finds no node with what it needs; the message is the scheduler's, or says that no scheduler has reported anything."""
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    """A pod's image cannot be pulled; the message names pod, image and the node's error."""
    POD_FAILED = "PodFailed"
    """A pod cannot start or keeps ending; the message names pod, container and why."""
    NODES_READY = "NodesReady"
    """All nodes are ready."""
    NODES_NOT_READY = "NodesNotReady"
    """The driver runs, but a node that was ready is no longer; the message counts them."""
    API_UNAVAILABLE = "ApiUnavailable"
    """The API server, or a webhook that it asks, failed when the RayJob was created; the operator retries. The message is theirs."""
    RUNNING = "Running"
    """The driver is training."""
    RESTARTING = "Restarting"
    """An attempt failed and another one follows; the message says when and why."""
    COMPLETED = "Completed"
    """All steps are done."""
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    """Nodes or workers were not ready within startupDeadlineSeconds; the message says what was missing."""
    ACTIVE_DEADLINE_EXCEEDED = "ActiveDeadlineExceeded"
    """The job ran longer than activeDeadlineSeconds."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """A step, a weight sync or another wait of the run passed its deadline; the message names it."""
    NODES_MISMATCH = "NodesMismatch"
    """The Ray cluster does not offer what the plan needs: a node, label or device is missing."""
    MODEL_INVALID = "ModelInvalid"
    """The model or its tokenizer cannot be loaded."""
    DATA_INVALID = "DataInvalid"
    """The data cannot be read or is empty."""
    REWARD_INVALID = "RewardInvalid"
    """A reward function cannot be imported or called, rewards fail on all samples, a judge refuses the job, or its budget is spent; the
    message carries the error."""
    CHECKPOINT_FAILED = "CheckpointFailed"
    """A checkpoint cannot be written or read, or belongs to another job."""
    WEIGHT_SYNC_FAILED = "WeightSyncFailed"
    """Trainer and engines have different weights."""
    OFFLOAD_FAILED = "OffloadFailed"
    """State of a component could not be moved between its devices and host memory."""
    WORKER_FAILED = "WorkerFailed"
    """A worker raised an error; the message carries it."""
    WORKER_LOST = "WorkerLost"
    """A worker process or its pod ended without reporting an error."""
    HEAD_LOST = "HeadLost"
    """The pod of the driver ended or was replaced, or nothing reaches it and none of its nodes runs any more."""
    EVICTED = "Evicted"
    """A pod of the job was drained, preempted or deleted, or its node no longer answers. Another attempt follows without using up
    failurePolicy.maxRestarts."""
    OUT_OF_MEMORY = "OutOfMemory"
    """A container was killed for its memory use; the message names it."""
    DRIVER_FAILED = "DriverFailed"
    """The driver exited without reporting an error; the message ends with the last lines of its log."""
    SUBMISSION_FAILED = "SubmissionFailed"
    """KubeRay could not submit the job to its Ray cluster."""
    STOPPED = "Stopped"
    """The Ray job was stopped externally, for example in the dashboard."""
    CHILD_DELETED = "ChildDeleted"
    """The RayJob of the current attempt was deleted externally."""

    @property
    def is_machine_failure(self) -> bool:
        """Whether an attempt that failed so is worth another one: the machine failed, not the spec, the data or the user's code."""
        return self in _MACHINE_FAILURES

    @property
    def is_disruption(self) -> bool:
        """Whether an attempt that failed so was ended by the cluster, for reasons that are not the job's."""
        return self is Reason.EVICTED

    @property
    def ends_attempt(self) -> bool:
        """Whether an attempt can end so; only about these a rule of failurePolicy can say something."""
        return self in _MACHINE_FAILURES or self in _OTHER_FAILURES


_MACHINE_FAILURES = frozenset(
    {
        Reason.STARTUP_DEADLINE_EXCEEDED,
        Reason.DEADLINE_EXCEEDED,
        Reason.NODES_MISMATCH,
        Reason.WEIGHT_SYNC_FAILED,
        Reason.OFFLOAD_FAILED,
        Reason.WORKER_LOST,
        Reason.HEAD_LOST,
        Reason.EVICTED,
        Reason.OUT_OF_MEMORY,
        Reason.DRIVER_FAILED,
        Reason.SUBMISSION_FAILED,
        Reason.CHILD_DELETED,
    }
)
_OTHER_FAILURES = frozenset(
    {
        Reason.MODEL_INVALID,
        Reason.DATA_INVALID,
        Reason.REWARD_INVALID,
        Reason.CHECKPOINT_FAILED,
        Reason.WORKER_FAILED,
        Reason.IMAGE_UNAVAILABLE,
        Reason.STOPPED,
    }
)
