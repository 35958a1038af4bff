"""How long answers will be, and what they cost: `bins`, `work` and `predictor`."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from deployments.config.engine import GangSection
from deployments.config.profile import calibrated
from deployments.config.section import Seconds, Section
from policies.gang.buckets import AdaptiveBucketsConfig, PromptBuckets
from policies.papers.bucket_serve import BucketServeConfig
from policies.router.multi_bin import EdgeRule, MultiBinConfig
from policies.router.promise import Promise
from policies.types import StepCoefficients, StepTimes
from predictor.asking import LEAST_S, MOST_S
from predictor.batching import BatchingConfig


class BinsSection(Section):
    """Bins of predicted output length. Engines with continuous batching run requests of all bins side by side, so by
    default bins change nothing there."""

    count: int = Field(default=4, ge=1, le=64)
    """How many; 1 does not tell lengths apart."""
    dispatch: Literal["requests", "rolling", "batches"] = "requests"
    """What engines of kind vllm are given. `requests`: each as soon as a replica has a slot. `rolling`: so until all
    slots of a replica are taken; then it takes the next requests when `engine.gang.batch_size` slots are free, and as
    many of one bin and class as there are. `batches`: an idle replica takes up to `engine.gang.batch_size` requests of
    one bin and class, once they are as many or one has waited for `engine.gang.max_wait_s`, and nothing more until all
    have ended; `fills_idle` calls none of them back. Engines of kind transformers always take batches."""
    serving: Literal["first_formed", "shortest_first"] = "first_formed"
    """Which batch goes first: the one that was formed first, or that of the shortest bin, until one has waited for
    `router.late_patience_s` (as it was when the replica started)."""
    seconds_per_token: Seconds | None = None
    """Seconds that a batch's answer takes for a token. With it `count` is the most, and a refit takes as many bins as
    pay at the present load: one while requests are few, because batches of many bins take long to fill."""
    rule: EdgeRule | None = None
    """How edges follow the observed lengths: `equal_mass`, `optimal` (least expected maximum of a batch), or `fixed`,
    which keeps `edges`; null is `optimal` where engines take batches, else `equal_mass`."""
    edges: tuple[float, ...] | None = None
    """count + 1 ascending edges in tokens to start with (for ever, with rule `fixed`)."""
    refit_every: int = Field(default=64, ge=1)
    """Finished requests between two adjustments of the edges."""
    prompt_buckets: int = Field(default=1, ge=1, le=8)
    """For batches, the most buckets of like prompt length in each bin, adjusted to the last `refit_every` prompts; 1
    does not tell prompts apart. Each bucket is one more queue for every bin, which takes longer to fill."""

    def build(self, gang: GangSection | None = None) -> MultiBinConfig:
        """Args:
        gang: how engines take batches, None where they take single requests.
        """
        return MultiBinConfig(
            bins=self.count,
            seconds_per_token=self.seconds_per_token if gang else None,
            batch_size=gang.batch_size if gang else GangSection().batch_size,
            rule=self.rule or ("optimal" if gang else "equal_mass"),
            initial_edges=self.edges,
            refit_every=self.refit_every,
            window_requests=WINDOW_REQUESTS,
        )

    def buckets(self, gang: GangSection, max_model_len: int, *, literal: bool = False) -> PromptBuckets | None:
        """Args:
        literal: see `papers.literal_buckets`.

        Returns:
            None where prompts are not told apart.
        """
        if self.prompt_buckets == 1:
            return None
        if not literal:
            return PromptBuckets(AdaptiveBucketsConfig(max_buckets=self.prompt_buckets), self.refit_every)
        halving = BucketServeConfig(l_max=max_model_len, max_buckets=self.prompt_buckets)
        return PromptBuckets(halving, self.refit_every, gang.batch_size)

    @model_validator(mode="after")
    def _is_valid(self) -> "BinsSection":
        self.build()
        return self


# Llama-3.1-8B in bf16 on an H100, decodes at 512 tokens of context, derived from AIConfigurator's kernel tables. Only
# ratios matter while all replicas are alike.
_PREFILL_S, _DECODE_STEP_S, _DECODE_S = 19.1e-6, 5.4e-3, 38e-6
# A vision tower of 0.6 billion parameters, as Qwen2.5-VL's, sees four patches for a token of the prompt; the model has
# 8 billion.
_ENCODER_S = 0.3 * _PREFILL_S
USUAL_STEP_TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.0, prefill_s=_PREFILL_S),
    decode=StepCoefficients(overhead_s=_DECODE_STEP_S, decode_s=_DECODE_S),
    mixed=StepCoefficients(overhead_s=_DECODE_STEP_S, prefill_s=_PREFILL_S, decode_s=_DECODE_S),
    encoder_s=_ENCODER_S,
)
# The last finished requests whose lengths count, for edges of bins and for the histogram.
WINDOW_REQUESTS = 4096
# Requests that usually share a decode step, by which the work of one is counted.
SHARED_BATCH = 32


class WorkSection(Section):
    """Step times by which predicted work is counted."""

    profile: Path | None = None
    """A file that `sluice calibrate` wrote for this model and hardware; null counts by the times of Llama-3.1-8B on an
    H100, whose ratios are like those of others."""
    default_output_tokens: int = Field(default=256, ge=1)
    """Assumed until a class has been seen."""

    def build(self) -> StepTimes:
        """Raises ConfigError when the profile cannot be used."""
        if self.profile is not None:
            return calibrated(self.profile)
        return USUAL_STEP_TIMES


_PREDICTOR_PACKAGES = ("torch", "transformers")  # of the extra `predictor`


class PredictorSection(Section):
    """What foresees the length of an answer."""

    kind: Literal["auto", "histogram", "bert"] = "auto"
    """`histogram` knows classes only; `bert` reads prompts, and leaves the word to it when late or worse. `auto` is
    `bert` where a class has `e2e_s` when the application starts and the extra `predictor` is installed, for there
    predictions keep promises: it only listens until it has proved better than the histogram. Else it is `histogram`."""
    place: Literal["replicas", "router"] = "replicas"
    """In replicas of its own, or inside each router process."""
    checkpoint: Path | None = None
    """What `sluice predictor train` wrote; null is the one that comes with Sluice."""
    replicas: int = Field(default=1, ge=1)
    """Predictors in replicas of their own, with `kind: bert`."""
    num_gpus: float = Field(default=0, ge=0)
    """GPUs for each predictor replica."""
    num_cpus: float = Field(default=1, ge=0)
    """Cores that Ray reserves for each predictor replica."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is bfloat16 on GPUs and on processors with instructions for it, where it is several times faster."""
    deadline_s: Seconds | None = None
    """The longest that a request waits for its prediction. Null is 15 ms; for one that is promised `e2e_s`, 3 % of that
    and 5 % of its `ttft_s`, from 15 ms to 0.5 s."""

    def reads_prompts(self, promises: Iterable[Promise]) -> bool:
        """Whether there is a learned predictor where classes are promised this."""
        if self.kind == "auto":
            return any(promise.e2e_s is not None for promise in promises) and all(map(find_spec, _PREDICTOR_PACKAGES))
        return self.kind == "bert"

    def own_replicas(self, promises: Iterable[Promise]) -> int:
        """Replicas that it has to itself; 0 inside the routers."""
        return self.replicas if self.place == "replicas" and self.reads_prompts(promises) else 0

    def group(self, promises: Iterable[Promise]) -> tuple[int, dict[str, float]]:
        """Its replicas, and Ray's resources of each."""
        return self.own_replicas(promises), {"CPU": self.num_cpus, "GPU": self.num_gpus}

    def batching(self) -> BatchingConfig:
        """For the most hurried callers a batch is short; for the most patient a prompt waits."""
        return BatchingConfig(max_batch_s=0.5 * (self.deadline_s or LEAST_S), max_age_s=self.deadline_s or MOST_S)
