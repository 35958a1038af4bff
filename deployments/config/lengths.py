"""How long answers will be, and what they cost: `bins`, `work` and `predictor`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from deployments.config.engine import GangSection
from deployments.config.profile import calibrated
from deployments.config.section import Seconds, Section
from policies.gang.buckets import AdaptiveBucketsConfig, PromptBuckets
from policies.papers.bucket_serve import BucketServeConfig
from policies.router.multi_bin import EdgeRule, MultiBinConfig
from policies.types import StepCoefficients, StepTimes
from predictor.batching import BatchingConfig


class BinsSection(Section):
    """Bins of predicted output length. Engines with continuous batching run requests of all bins side by side, so by
    default bins change nothing there."""

    count: int = Field(default=4, ge=1, le=64)
    """How many; 1 does not tell lengths apart."""
    dispatch: Literal["requests", "batches"] = "requests"
    """What engines of kind vllm are given: `requests`, each as soon as a replica has a slot, or `batches`: an idle
    replica takes up to `engine.gang.batch_size` requests of one bin and class, once they are as many or one has waited
    for `engine.gang.max_wait_s`, and nothing more until all have ended; `fills_idle` calls none of them back. Engines
    of kind transformers always take batches."""
    serving: Literal["first_formed", "shortest_first"] = "first_formed"
    """Which batch goes first: the one that was formed first, or that of the shortest bin, until one has waited for
    `router.late_patience_s` (as it was when the replica started)."""
    seconds_per_token: Seconds | None = None
    """Of batches. With it `count` is the most, and every refit takes as many bins as pay at the load of the
    moment: one while requests are few, for which batches of many bins would take too long to fill."""
    rule: EdgeRule | None = None
    """How edges follow the observed lengths: `equal_mass`, `optimal` (least expected maximum of a batch), or `fixed`,
    which keeps `edges`; null is `optimal` where engines take batches, else `equal_mass`."""
    edges: tuple[float, ...] | None = None
    """count + 1 ascending edges in tokens to start with (for ever, with rule `fixed`)."""
    refit_every: int = Field(default=64, ge=1)
    """Finished requests between two adjustments of the edges."""
    window_requests: int = Field(default=4096, ge=8)
    """The last finished requests whose lengths count."""
    prompt_buckets: int = Field(default=1, ge=1, le=8)
    """Of batches: most buckets of like prompt length in each bin, adjusted to the last `refit_every` prompts; 1
    does not tell prompts apart. Each makes one more queue for every bin, which takes longer to fill."""
    bucket_rule: Literal["adaptive", "literal"] = "adaptive"
    """How buckets follow the prompts: `adaptive` cuts where padding is saved, and merges where it is not; `literal` is
    BucketServe's Algorithm 1, which halves a bucket of more than `engine.gang.batch_size` prompts of which most are in
    its lower half, up to `prompt_buckets`."""

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
            window_requests=self.window_requests,
        )

    def buckets(self, gang: GangSection, max_model_len: int) -> PromptBuckets | None:
        """None where prompts are not told apart."""
        if self.prompt_buckets == 1:
            return None
        if self.bucket_rule == "adaptive":
            return PromptBuckets(AdaptiveBucketsConfig(max_buckets=self.prompt_buckets), self.refit_every)
        literal = BucketServeConfig(l_max=max_model_len, max_buckets=self.prompt_buckets)
        return PromptBuckets(literal, self.refit_every, gang.batch_size)

    @model_validator(mode="after")
    def _is_valid(self) -> "BinsSection":
        self.build()
        if self.bucket_rule == "literal" and self.prompt_buckets == 1:
            raise ValueError(
                "bucket_rule: literal splits nothing while prompt_buckets is 1: set that to the most of them"
            )
        return self


class WorkSection(Section):
    """Step times by which predicted work is counted; only their ratios matter while all replicas are alike.

    Defaults: Llama-3.1-8B in bf16 on an H100, beta at context 512, derived from AIConfigurator's kernel tables.
    """

    profile: Path | None = None
    """A file that `sluice calibrate` wrote for this model and hardware, in the place of the three numbers below."""
    prefill_s_per_token: float = Field(default=19.1e-6, ge=0, allow_inf_nan=False)
    """What a prompt token adds to a step."""
    decode_step_s: float = Field(default=5.4e-3, ge=0, allow_inf_nan=False)
    """What a decode step takes, however many requests share it."""
    decode_s_per_request: float = Field(default=38e-6, ge=0, allow_inf_nan=False)
    """What a request adds to a decode step."""
    batch_size: int = Field(default=32, ge=1)
    """Requests that usually share a decode step."""
    default_output_tokens: int = Field(default=256, ge=1)
    """Assumed until a class has been seen."""

    def build(self) -> StepTimes:
        """Raises ConfigError when the profile cannot be used."""
        if self.profile is not None:
            return calibrated(self.profile)
        prefill = StepCoefficients(overhead_s=0.0, prefill_s=self.prefill_s_per_token)
        decode = StepCoefficients(overhead_s=self.decode_step_s, decode_s=self.decode_s_per_request)
        mixed = StepCoefficients(
            overhead_s=self.decode_step_s, prefill_s=self.prefill_s_per_token, decode_s=self.decode_s_per_request
        )
        return StepTimes(prefill=prefill, decode=decode, mixed=mixed)


class PredictorSection(Section):
    """What foresees the length of an answer."""

    kind: Literal["histogram", "bert"] = "histogram"
    """`histogram` knows classes only; `bert` reads prompts, and leaves the word to it when late or worse."""
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
    deadline_s: Seconds = 0.015
    """The longest that a request waits for its prediction."""
    max_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens scored together, at most: batches begin with 512 and become what the machine does in half the deadline."""
    max_wait_s: float = Field(default=0.002, ge=0, le=0.1)
    """How long an idle predictor waits for company for a prompt."""
    max_waiting: int = Field(default=256, ge=1)
    """Prompts that may wait for the predictor; for more the histogram stands in at once."""
    cache_entries: int = Field(default=8192, ge=0)
    """Predictions remembered, by prompt."""

    @property
    def own_replicas(self) -> int:
        """Replicas that it has to itself; 0 inside the routers."""
        return self.replicas if self.kind == "bert" and self.place == "replicas" else 0

    def batching(self) -> BatchingConfig:
        return BatchingConfig(
            max_batch_tokens=self.max_batch_tokens,
            max_wait_s=self.max_wait_s,
            max_age_s=self.deadline_s,
            max_waiting=self.max_waiting,
            cache_entries=self.cache_entries,
        )
