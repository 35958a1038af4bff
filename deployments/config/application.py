"""The application's configuration, as it stands in YAML: checked wholly before anything starts.

    applications:
      - name: sluice
        import_path: deployments.app:build
        args: <AppConfig>

Unknown keys are refused with their path. Every default is what `sluice serve` uses.
"""

import hashlib
import ipaddress
import json
import math
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Container, Sequence
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    JsonValue,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.config.messages import ARGUMENTS, what_is_wrong
from deployments.config.profile import calibrated
from deployments.config.reference import AllBut
from deployments.config.scheduler import KEY, SCHEDULER_CLASS, SchedulerSettings, Seconds
from deployments.process.environment import REDIS_URL_ENV, cpu_dtype
from deployments.process.log_settings import LogFormat, LogLevel, LogSettings, LogTarget
from policies.errors import ConfigError
from policies.gang.batches import GangConfig
from policies.gang.buckets import AdaptiveBucketsConfig, BucketServeConfig, PromptBuckets
from policies.gang.packing import Packing
from policies.gang.prefill import PrefillConfig, PrefillMode
from policies.registry import Family, build_of
from policies.router.credit import longest_promise_s, lookahead
from policies.router.multi_bin import EdgeRule, MultiBinConfig
from policies.router.order import IdleOrder, Order
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.router.prefill_decode import BucketOrderConfig, PrefillDecodeConfig, TransferTimes
from policies.router.promise import Promise
from policies.types import StepCoefficients, StepTimes
from predictor.batching import BatchingConfig
from router.admission import ClassLimits
from router.classifier import Mode
from router.redis_store import state_version
from router.routed_client import RoutedClientConfig

ServiceTier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
"""OpenAI's, or another word; it stands in answers as it is."""
Bundle = Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]
"""Of a placement group: Ray resources by their names."""
Role = Literal["prefill", "decode"]
"""Of an engine replica; without a group of its own for prefill, every replica's is "decode"."""

DEMO = "demo"
DEMO_NAME = "sluice-demo"
DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
DEMO_ARGS = (
    "--max-model-len", "2048", "--max-num-seqs", "64", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20),
    # So small a model, left free to, would fill a JSON answer with blanks.
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip


class Section(BaseModel):
    """Refuses what it does not know; its errors do not show what was given, which may hold a password.

    FIXED: fields whose change restarts engines; deployments/config/live.py changes the others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)
    FIXED: ClassVar[Container[str]] = AllBut()


class ScalingSection(Section):
    """Between which numbers of replicas, and how long a need must stand."""

    min_replicas: int = Field(default=1, ge=1)
    """Also at no traffic at all: from nothing, no replica would be there to report."""
    max_replicas: int = Field(ge=1)
    """However great the need."""
    upscale_delay_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """How long the need for more must stand."""
    downscale_delay_s: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    """How long the need for fewer must stand: longer than loading the model takes."""
    interval_s: Seconds = 1.0
    """How often the need is looked at."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is below min_replicas ({self.min_replicas})")
        return self


class AutoscalingSection(ScalingSection):
    """Shared engine replicas follow the predicted work."""

    slot_use: float = Field(default=0.8, gt=0, lt=1)
    """Fraction of all slots that should be in use."""
    max_queue_s: Seconds = 5.0
    """Longest time that working off the queue should take, by prediction."""


class RouterAutoscalingSection(ScalingSection):
    """Routers follow the CPU that they use."""

    cpu_use: float = Field(default=0.6, gt=0, lt=1)
    """Cores that a router should use on average; it cannot use much more than one."""


class RouterSection(Section):
    """The deployment that speaks HTTP."""

    FIXED: ClassVar[Container[str]] = AllBut(
        {
            "max_body_bytes", "max_buffered_bytes", "body_timeout_s", "max_engine_requests", "max_prompt_logprobs",
            "grammar_timeout_s", "max_wait_s", "late_patience_s",
        }
    )  # fmt: skip

    replicas: int = Field(default=1, ge=1)
    """One front end handles about 13 000 tokens/s per core: several for each fast GPU."""
    autoscaling: RouterAutoscalingSection | None = None
    """In place of a fixed number of replicas."""
    num_cpus: float = Field(default=1, ge=0)
    """Cores that Ray reserves for each router."""
    max_ongoing_requests: int = Field(default=10_000, ge=1)
    """HTTP requests that one router replica handles at once; 1 000 more wait for it, beyond them it is 503 with
    Retry-After."""
    max_body_bytes: int | None = Field(default=None, ge=1024)
    """Longer request bodies get 413. null goes by the model: 1 MiB, or 64 MiB where it takes images or sounds, and 32
    bytes for each token of its context."""
    max_buffered_bytes: int = Field(default=512 << 20, ge=1 << 20)
    """Bodies of all requests that a router handles together. Beyond it the largest of those still on their way get
    503."""
    body_timeout_s: Seconds = 30.0
    """The longest that a body may take to come; then it gets 408."""
    max_engine_requests: int = Field(default=256, ge=1)
    """Prompts, conversations or items of one HTTP request, times the answers to each. More get 400."""
    max_prompt_logprobs: int = Field(default=1 << 14, ge=1)
    """Values that `prompt_logprobs` (or `echo` with `logprobs`) may ask for: tokens of the prompt, times one more than
    the logprobs of each. More get 400. vLLM's front end makes them while all streams of the router wait: a hundred
    thousand take about a second."""
    grammar_timeout_s: Seconds = 5.0
    """The longest that a schema, regular expression or grammar may take to compile, in seconds of a core; then its
    request gets 400."""
    media_networks: list[IPvAnyNetwork] = []
    """Networks, as 10.1.0.0/16, from which images, audio and video that a request names by URL are fetched, besides
    public addresses. Other private, loopback and link-local addresses are refused, also after a redirect. Where routers
    reach the world by a proxy (HTTP_PROXY), its address must be in one of them; what it fetches is for itself to
    check."""
    max_wait_s: Seconds = 600.0
    """The longest that a request may wait for a replica before it fails."""
    late_patience_s: Seconds = 60.0
    """A request that stands behind those in time, for it is late, has no target or fills idle capacity, and has waited
    for longer, is owed one start in ten."""
    heartbeat_s: Seconds = 1.0
    """How often routers and replicas say that they live, and exchange what they have learned."""
    silence_s: Seconds = 10.0
    """A replica or router of this configuration that sends no heartbeat for this long is taken for dead."""

    @model_validator(mode="after")
    def _beats_often_enough(self) -> "RouterSection":
        if self.silence_s < 3 * self.heartbeat_s:
            raise ValueError(f"silence_s ({self.silence_s}) must be at least three heartbeat_s ({self.heartbeat_s})")
        return self

    def build(self) -> RoutedClientConfig:
        return RoutedClientConfig(
            max_wait_s=self.max_wait_s,
            heartbeat_s=self.heartbeat_s,
            silence_s=self.silence_s,
        )


class LoraSection(Section):
    """LoRA adapters over the model, each served by a name of its own, on every replica."""

    adapters: dict[str, str] = Field(min_length=1)
    """By the name that clients use: a folder that every node has, or a name on the hub."""
    max_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """The highest rank among the adapters; memory is set aside for it."""
    max_in_step: int = Field(default=4, ge=1)
    """Adapters that one engine step may use; the engine keeps that many on the device, requests for others wait."""

    def vllm_argv(self) -> list[str]:
        in_memory = max(len(self.adapters), self.max_in_step)  # all, so that none is read from disk while serving
        modules = [json.dumps({"name": name, "path": path}) for name, path in self.adapters.items()]
        limits = ["--max-loras", str(self.max_in_step), "--max-lora-rank", str(self.max_rank)]
        return ["--enable-lora", *limits, "--max-cpu-loras", str(in_memory), "--lora-modules", *modules]


class GangSection(Section):
    """Batches that run until their longest request ends: of the Transformers engine, and `batch_size` and `max_wait_s`
    of engines of kind vllm with `bins.dispatch: batches`."""

    batch_size: int = Field(default=8, ge=1, le=1024)
    """Most requests of a batch; all are of one bin and class. What memory allows may be less, and `--max-num-seqs`."""
    max_wait_s: float = Field(default=0.1, ge=0)
    """How long a request waits for a full batch; 0 starts with what is there, .inf waits for ever."""
    prefill: PrefillMode = "prepacked"
    """`prepacked` puts short prompts into shared rows, `padded` gives each a row, `length_ordered` runs prompts of like
    length together."""
    max_pass_tokens: int = Field(default=8192, ge=1)
    """Tokens of a forward pass of prefill, padding included, as far as one row allows."""
    row_tokens: int | None = Field(default=None, ge=1)
    """Least tokens of a packed row; null is the longest prompt of the batch."""
    packing: Packing = "first_fit"
    """Where `prepacked` puts the next shorter prompt: `first_fit` into the first row with room, as paper 004 says,
    `best_fit` into the fullest, as its authors' code does. The rows are about as many."""
    pack_decode_from: float = Field(default=1.5, ge=1)
    """With `prepacked`, requests share rows of the cache in decode steps as well, where (padded / packed places of the
    cache) / (packed / padded tokens of a step) is at least this; .inf never."""
    flash_attention: bool = True
    """FlashAttention's kernels where they are installed and the model, in 16 bits, can use them; `row_tokens` and
    `pack_decode_from` do nothing then. false is PyTorch's attention."""
    shrink: bool = True
    """Rows leave the batch as they end; false computes all of them until the longest ends."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a batch's cache may hold, padding included; null is by the memory that is free at the start."""
    gather_s: Seconds = 0.01
    """The engine starts when nothing has come for so long: the requests of a batch may come from several routers."""

    def of_transformers_only(self) -> list[str]:
        """Names of settings that differ from their defaults and that an engine of kind vllm would not heed."""
        given = self.model_dump(exclude_defaults=True).keys()
        return sorted(given - {"batch_size", "max_wait_s"})

    def prefill_config(self) -> PrefillConfig:
        return PrefillConfig(
            mode=self.prefill,
            max_pass_tokens=self.max_pass_tokens,
            row_tokens=self.row_tokens,
            packing=self.packing,
            pack_decode_from=self.pack_decode_from,
        )

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        GangConfig(batch_size=self.batch_size, max_wait_s=self.max_wait_s)
        return self


class PrefillSection(Section):
    """Replicas that only read prompts; `engine.replicas` then decode, and read what is not worth the way.

    They are placed as those are, with the same GPUs, model and arguments.
    """

    replicas: int = Field(default=1, ge=1)
    """Replicas that only read prompts."""
    autoscaling: AutoscalingSection | None = None
    """In place of a fixed number of replicas."""
    resources: dict[str, float] | None = None
    """Custom Ray resources for each of them; null is those of `engine`."""
    scheduler: SchedulerSettings = SchedulerSettings(mode="mixed", admission="slots")
    """Their engine steps."""
    connector: Literal["nixl", "file"] = "nixl"
    """How KV caches travel: `nixl` from memory to memory (package nixl), `file` through a folder that both see."""
    keep_s: float = Field(default=30.0, ge=6, allow_inf_nan=False)
    """How long a cache is kept for a replica that has not begun to fetch it. It holds its blocks meanwhile."""
    folder: Path | None = None
    """Of connector `file`; null is a folder under the temporary ones of this machine."""
    max_folder_bytes: int = Field(default=4 << 30, ge=1)
    """Beyond this the folder takes nothing, and decode replicas read prompts themselves."""
    split: Literal["auto", "always", "never"] = "auto"
    """Which requests: `auto` where reading the prompt would break its `tpot_s` for those that decode."""
    min_prompt_tokens: int = Field(default=256, ge=1)
    """Shorter prompts are never split."""
    max_wait_s: Seconds = 2.0
    """Prompts that would wait longer for these replicas go to the others."""
    bucket_window_s: float = Field(default=0.25, ge=0, allow_inf_nan=False)
    """Prompts that come within one such window are read bucket by bucket; 0 is first come, first served."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Of the KV cache that is free on such a replica, how much the prompts may take that it is given at once: the rest
    is for caches that wait to be fetched. BucketServe's equations 5 and 6."""
    transfer_overhead_s: float = Field(default=0.002, ge=0, allow_inf_nan=False)
    """Seconds that moving a cache takes, whatever its size."""
    transfer_s_per_token: float = Field(default=5.2e-6, ge=0, allow_inf_nan=False)
    """And for each token; the default is 131 072 bytes over 25 GB/s."""

    def policy(self, max_batch_tokens: int) -> PrefillDecodeConfig:
        return PrefillDecodeConfig(
            mode=self.split,
            min_prompt_tokens=self.min_prompt_tokens,
            max_batch_tokens=max_batch_tokens,
            max_wait_s=self.max_wait_s,
            transfer=TransferTimes(overhead_s=self.transfer_overhead_s, s_per_token=self.transfer_s_per_token),
        )

    def order(self) -> BucketOrderConfig:
        return BucketOrderConfig(window_s=self.bucket_window_s)


class EngineSection(Section):
    """The deployment that runs the model."""

    FIXED: ClassVar[Container[str]] = AllBut({"credit_s"})

    kind: Literal["vllm", "transformers"] = "vllm"
    """`transformers` runs any causal model that Hugging Face Transformers loads, in gang batches."""
    gang: GangSection = GangSection()
    """How an engine takes whole batches."""
    replicas: int = Field(default=1, ge=1)
    """Replicas for all classes; `classes.NAME.own_replicas` come on top."""
    prefill: PrefillSection | None = None
    """A second group of replicas, which only reads prompts; see docs/guides/prefill-decode.md."""
    autoscaling: AutoscalingSection | None = None
    """In place of a fixed number of replicas."""
    num_gpus: float = Field(default=0, ge=0)
    """GPUs for each replica; 0 runs the CPU build."""
    num_cpus: float = Field(default=1, ge=0)
    """Cores that Ray reserves for each replica; it may use more."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources for each replica, to place it."""
    placement_group_bundles: tuple[Bundle, ...] = ()
    """Of an engine larger than a node: its parts, each on one node, by their Ray resources, as `{GPU: 1}`. A worker of
    vLLM's runs in each bundle with a GPU, the replica in the first, which needs `num_cpus` and `resources` besides."""
    placement_group_strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """How Ray places the bundles: `PACK` on as few nodes as it can, `SPREAD` on as many; `STRICT_PACK` on one, and
    `STRICT_SPREAD` each on one of its own, or not at all."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of each replica, on top of what the CPU build needs."""
    bind_host: str | None = None
    """Numeric address on which a replica listens, and which routers call; null is the node's own in the cluster."""
    credit_lookahead: int | None = Field(default=None, ge=0)
    """Requests offered to a replica beyond its slots, so that the next one is at hand when one ends. null is an eighth
    of the slots where first tokens are promised, else 0: an engine that can choose who is next keeps more promises."""
    credit_s: float | None = Field(default=None, gt=0)
    """A replica that has unread prompt tokens for so many seconds takes nothing more: what waits stays where all
    replicas share it. null is the longest `ttft_s` of the classes that do not fill idle capacity, .inf sets
    no bound."""
    lora: LoraSection | None = None
    """Adapters served beside the model."""
    scheduler: SchedulerSettings = SchedulerSettings()
    """What each engine step may do; `mode: stock` is plain vLLM."""
    start_timeout_s: Seconds = 1800.0
    """How long loading the model may take."""
    hang_timeout_s: Seconds = 120.0
    """An engine that hangs for so long is replaced: longer than its longest step."""
    drain_timeout_s: Seconds = 3600.0
    """How long running requests may go on when a replica is told to leave: at least the longest generation."""

    @field_validator("bind_host")
    @classmethod
    def _can_be_called(cls, host: str | None) -> str | None:
        try:
            everywhere = host is not None and ipaddress.ip_address(host).is_unspecified
        except ValueError:
            raise ValueError(f"must be a numeric address, got {host!r}") from None
        if everywhere:
            raise ValueError(f"{host} is no address that routers on other nodes could call: name one, or leave it out")
        return host

    @model_validator(mode="after")
    def _fits_into_its_bundles(self) -> Self:
        bundles = self.placement_group_bundles
        if not bundles:
            if self.placement_group_strategy != "PACK":
                raise ValueError("placement_group_strategy places placement_group_bundles, and there are none")
            return self
        if too_many := next((bundle for bundle in bundles if bundle.get("GPU", 0) not in (0, 1)), None):
            raise ValueError(
                f"placement_group_bundles: vLLM runs one worker in each bundle with a GPU, make several of {too_many}"
            )
        gpus = sum(bundle.get("GPU", 0) for bundle in bundles)
        if not gpus:
            raise ValueError("placement_group_bundles are of engines on GPUs: one on CPUs has a node, leave them out")
        if gpus != self.num_gpus:
            raise ValueError(
                f"num_gpus is {self.num_gpus:g}, and placement_group_bundles hold {gpus:g} GPUs: set num_gpus to that"
            )
        own = {"CPU": self.num_cpus} | self.resources
        if lacking := {name: amount for name, amount in own.items() if amount > bundles[0].get(name, 0)}:
            raise ValueError(
                f"the replica runs in the first of placement_group_bundles, which lacks {lacking}, by num_cpus and "
                "resources: add it there, or set num_cpus to 0"
            )
        if self.prefill is not None:
            raise ValueError("prefill hands caches from node to node: it goes without placement_group_bundles")
        return self


def least_replicas(group: EngineSection | PrefillSection | RouterSection) -> int:
    """How many there are at the start, and of a group that is scaled at any time."""
    return group.autoscaling.min_replicas if group.autoscaling else group.replicas


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


class ClassSection(Section):
    """A service class."""

    FIXED: ClassVar[Container[str]] = frozenset({"own_replicas"})

    ttft_s: Seconds | None = 1.0
    """Target for the first token, from the arrival of the HTTP request; the earliest deadline starts first. None has no
    target: it goes behind those that can be in time, and before late ones."""
    tpot_s: Seconds | None = None
    """Target for the time per token after the first, on average over an answer; the engine keeps to the strictest among
    what it runs. None has no target."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests of this class that may wait; more get 429 with Retry-After."""
    when_late: Literal["serve", "refuse"] = "serve"
    """What becomes of a request whose first token is predicted to come too late when it arrives: `serve` lets it wait
    behind those that can be in time, up to router.max_wait_s; `refuse` gives it 429 with Retry-After."""
    max_key_share: float = Field(default=0.5, gt=0, le=1)
    """How much of `max_waiting` one API key may have; more of its requests get 429 with Retry-After, and the rest stays
    for others. 1 sets no bound, and requests without a key have none."""
    fills_idle: bool = False
    """It takes what the others leave: a running request gives its slot back, and goes on later where it stands, when
    one of another class waits that is due earlier."""
    order: IdleOrder = "deadline"
    """With `fills_idle`, its requests among themselves: `deadline` as they came, or by prompt length those that come
    within one `ttft_s` (without one, `router.late_patience_s`), window by window. `shortest_first` ends more requests
    a second while they wait, `longest_first` brings the long ones together; a longer `ttft_s` sorts more of them."""
    own_replicas: int = Field(default=0, ge=0)
    """Replicas that serve this class alone, besides the shared ones, which it may use too."""

    @model_validator(mode="after")
    def _orders_what_fills_idle_capacity(self) -> Self:
        if self.order != "deadline" and not self.fills_idle:
            raise ValueError(f"order: {self.order} is for classes that fill idle capacity: set fills_idle: true")
        return self

    def promise(self) -> Promise:
        return Promise(ttft_s=self.ttft_s, tpot_s=self.tpot_s)

    def limits(self) -> ClassLimits:
        refuses_late = self.when_late == "refuse"
        return ClassLimits(max_waiting=self.max_waiting, refuses_late=refuses_late, max_key_share=self.max_key_share)


class PlacementSection(Section):
    """Which replica takes a request: the one predicted to send its first token soonest (docs/guides/prefixes.md)."""

    prefix_entries: int = Field(default=65536, ge=1)
    """(replica, block of 64 tokens) pairs that a router remembers of the prompts that it sent, some 200 bytes each."""

    def prefixes(self) -> PrefixIndex:
        return PrefixIndex(PrefixIndexConfig(max_entries=self.prefix_entries))


class KeysSection(Section):
    """API keys. Without a source here and without SLUICE_API_KEYS in the environment, anyone may ask."""

    file: Path | None = None
    """YAML file of keys, see deployments/http/keys.py; read again when it changes."""
    redis: bool = False
    """Keys in Redis, written by `sluice keys new --store`."""
    isolate_prefixes: bool = False
    """Whether requests of each key find only prompts of that key in the caches. Without, how soon an answer begins can
    tell what others asked; with, what several keys ask is read once for each of them."""


class LogsSection(Section):
    """Logs of Sluice's processes, with a line for each request when it ends, never with what it says. Routers and
    engine replicas follow a change. The runner of batches and predictor replicas of their own go by `args`."""

    FIXED: ClassVar[Container[str]] = frozenset()

    to: LogTarget = "files"
    """`files` of Ray's in each node's session folder. `stdout` has a copy of every line on the standard output of the
    pod, or of what else has started Ray there: `ray start --block`, `sluice serve`."""
    format: LogFormat = "json"
    """`json` has one object a line, `human` text for people."""
    level: LogLevel | None = None
    """From which one on; the line of a request is INFO. null goes by SLUICE_LOG_LEVEL, and without it by INFO."""

    def settings(self) -> LogSettings:
        return LogSettings(to=self.to, format=self.format, level=self.level)


class BatchesSection(Section):
    """OpenAI's Batch API: files of requests that are answered within hours, by what other requests leave idle."""

    folder: str | None = None
    """Where files and batches are kept: a path from the root, or any URL that fsspec knows, as s3://bucket/folder. All
    nodes must see it. null has no Batch API."""
    slo_class: str = "offline"
    """The class of the requests of batches; one with `fills_idle` delays no other class."""
    max_file_bytes: int = Field(default=200 << 20, ge=1)
    """Larger uploads get 413."""
    max_stored_bytes: int = Field(default=20 << 30, ge=1)
    """Files of one API key together; uploads beyond it get 413."""
    upload_timeout_s: Seconds = 600.0
    """The longest that an upload may take; then it gets 408."""
    max_lines: int = Field(default=100_000, ge=1)
    """Requests of a batch; it fails with more."""
    max_open: int = Field(default=100, ge=1)
    """Batches of one API key that have not ended; more get 429."""
    max_window_s: Seconds = 7 * 86_400.0
    """The longest `completion_window`; longer ones get 400."""
    keep_s: Seconds = 30 * 86_400.0
    """How long files and ended batches are kept."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Requests of batches that one model's engines may have together, however idle they are."""
    segment_s: Seconds = 5.0
    """How often answers are written down. Those since the last time are computed again after a failure."""
    num_cpus: float = Field(default=0.1, ge=0)
    """Cores that Ray reserves for the process that runs batches."""

    @field_validator("folder")
    @classmethod
    def _is_the_same_in_every_process(cls, folder: str | None) -> str | None:
        if folder is not None and not re.match(r"/|[a-z][a-z0-9+.-]*://", folder):
            raise ValueError(f"must be a path from the root or a URL, got {folder!r}: processes have other folders")
        return folder

    @model_validator(mode="after")
    def _keeps_what_runs(self) -> Self:
        if self.keep_s <= self.max_window_s:
            raise ValueError(f"keep_s ({self.keep_s:g}) must be above max_window_s ({self.max_window_s:g})")
        return self


class ResponsesSection(Section):
    """What `/v1/responses` stores in Redis, so that any router can tell it, go on from it and cancel it."""

    store: bool = True
    """Whether anything is stored. Where not, requests that need it get 400: `store: true`, `background` and
    `previous_response_id`."""
    keep_s: Seconds = 86_400.0
    """How long a response is kept after its end."""
    max_stored_bytes: int = Field(default=64 << 20, ge=1)
    """Of all stored responses, each with its whole conversation; for another the oldest go. It must fit what memory
    Redis has besides its queue."""
    max_key_share: float = Field(default=0.5, gt=0, le=1)
    """Of `max_stored_bytes`, how much one API key may fill before its own oldest go. Requests without a key have it
    all."""


class OrderSection(Section):
    """Order of waiting requests: whose first token is due earlier starts earlier."""

    FIXED: ClassVar[Container[str]] = AllBut({"policy_args"})

    policy: str | None = None
    """A class of your own, `package.module:Class`, or another order of policies/registry.py by name, in the place of
    that deadline. See docs/guides/write-a-policy.md."""
    policy_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of `policy`, its keywords."""

    @model_validator(mode="after")
    def _has_one_order(self) -> Self:
        if self.policy is None and self.policy_args:
            raise ValueError("policy_args are settings of policy, and there is none")
        self.build()
        return self

    def build(self) -> Order | None:
        """None goes by what each request is promised."""
        if self.policy is None:
            return None
        order: Order = build_of(Family.ORDER, self.policy, self.policy_args)
        return order


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


def _default_classes() -> dict[str, ClassSection]:
    return {
        "interactive": ClassSection(ttft_s=0.5),
        "standard": ClassSection(ttft_s=2.0),
        "offline": ClassSection(ttft_s=60.0, fills_idle=True),
    }


_LORA_ARGS = {"--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras"}


_SET_ELSEWHERE = {
    "--model": "model",
    "--served-model-name": "served_model_name",
    "--host": "HTTP options of Serve",
    "--port": "HTTP options of Serve",
    "--api-server-count": "router.replicas",
    "--api-key": "keys",
    # Of such an engine routers would be offered the slots of one rank: relays ask rank 0.
    "--data-parallel-size": "engine.replicas",
    "-dp": "engine.replicas",
}


# Ray Serve and HAProxy listen in its place.
_OF_VLLMS_SERVER = {
    "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers", "--enable-ssl-refresh",
    "--uds", "--grpc", "--headless",
}  # fmt: skip


# What vLLM's front end does by statistics that are off here, or by a queue of its own.
_NOT_IN_ROUTERS = {
    "--otlp-traces-endpoint": "needs vLLM's own statistics, which are off: OTEL_EXPORTER_OTLP_ENDPOINT traces",
    "--collect-detailed-traces": "needs --otlp-traces-endpoint, which routers do not have",
    "--enable-per-request-metrics": "needs vLLM's own statistics, which are off: Server-Timing tells the times",
    "--max-num-queued-tokens": "counts whatever shows no first token here: see max_waiting and when_late of classes",
}


# Ray starts an engine's processes on other nodes, in its bundles. With these it would wait for others to start them.
_OF_SEVERAL_NODES = {"--nnodes", "--node-rank", "--master-addr", "--master-port"}


# The class in `deployments.engines.vllm.kv_files`.
FILE_CONNECTOR = "FileConnector"


# Each multiplies the GPUs of an engine.
_PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--prefill-context-parallel-size", "-pcp"),
)


# Whoever sets these counts on another placement, precision or adapters of the model than the Transformers engine has.
_NOT_FOR_TRANSFORMERS = {
    *(name for names in _PARALLEL for name in names),
    "--enable-expert-parallel", "--quantization", "-q", "--speculative-config", "--scheduler-cls",
    "--additional-config", "--kv-transfer-config", *_LORA_ARGS,
}  # fmt: skip


_EXECUTOR = "--distributed-executor-backend"


# With these the arguments do not say how many GPUs an engine has here.
_PLACED_ELSEWHERE = {"--config", _EXECUTOR}


# Of a machine's memory, for all engines on its processors together: the rest is for routers, Ray and everybody else.
CPU_MEMORY_SHARE = 0.6
_MEMORY = {"--gpu-memory-utilization", "--kv-cache-memory-bytes", "--config"}


def why_refused(option: str) -> str | None:
    """Why `vllm_args` cannot have an option of vLLM's, with hyphens; None where they can."""
    if option in _SET_ELSEWHERE:
        return f"{option} is set by {_SET_ELSEWHERE[option]}, not by vllm_args"
    if option in _OF_VLLMS_SERVER:
        return f"{option} is of vLLM's own server, which does not run here; TLS goes in front of Sluice"
    if option in _OF_SEVERAL_NODES:
        return (
            f"{option} is for engines whose processes somebody else starts on other nodes: leave it out, and set "
            "engine.placement_group_bundles"
        )
    return f"{option} {_NOT_IN_ROUTERS[option]}" if option in _NOT_IN_ROUTERS else None


def why_one_worker(workers: int) -> str | None:
    """Why engines that move caches through files cannot have so many workers; None where they can."""
    if workers == 1:
        return None
    return (
        f"engine.prefill.connector: file keeps one file for each prompt, and {workers} workers of an engine "
        "would each write theirs into it: take nixl"
    )


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Options of a command line, with hyphens, and their values; "" where none follows."""
    found: dict[str, str] = {}
    for arg, following in zip_longest(argv, argv[1:], fillvalue=""):
        if arg.startswith("-"):
            name, _, value = arg.partition("=")
            found[name.replace("_", "-")] = value or following
    return found


def _without(argv: Sequence[str], names: Container[str]) -> list[str]:
    """An argument list without these options and their values."""
    kept, keeps = list[str](), True
    for arg in argv:
        keeps = arg not in names if arg.startswith("-") else keeps
        if keeps:
            kept.append(arg)
    return kept


def _gpus_used(argv: Sequence[str], *, in_bundles: bool) -> int | None:
    """GPUs of one engine by vLLM's arguments; None where they do not say."""
    silent = {"--config"} if in_bundles else _PLACED_ELSEWHERE
    return None if _options(argv).keys() & silent else _workers(argv)


def _workers(argv: Sequence[str]) -> int | None:
    """Parts into which vLLM's arguments split one engine, wherever they run; None where it is for vLLM to complain."""
    given = _options(argv)
    sizes = [next((given[name] for name in names if name in given), "1") for names in _PARALLEL]
    return prod(map(int, sizes)) if all(size.isdecimal() for size in sizes) else None


class ModelSection(Section):
    """A model and the engines that run it."""

    model: str
    """A local folder, the name of a model on the hub, or `demo` for the small model that comes with Sluice."""
    served_model_name: str | None = None
    """The name that clients use; null is `model`, and `sluice-demo` for `demo`."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments as `vllm serve` takes them, one item each; those that suit `demo` go before them."""
    engine: EngineSection = EngineSection()
    work: WorkSection = WorkSection()

    @property
    def public_name(self) -> str:
        return self.served_model_name or (DEMO_NAME if self.model == DEMO else self.model)

    def sharing_memory(self, engines: int) -> Self:
        """With a part of the machine's memory for each of so many engines on its processors, if nothing says how much:
        vLLM would take nearly all of it for each."""
        takes_what_it_needs = self.model == DEMO or self.engine.kind != "vllm" or self.engine.num_gpus
        said = _options(self.vllm_args).keys() & _MEMORY or "VLLM_CPU_KVCACHE_SPACE" in self.engine.env
        if takes_what_it_needs or said:
            return self
        share = ("--gpu-memory-utilization", f"{CPU_MEMORY_SHARE / engines:.3g}")
        return self.model_copy(update={"vllm_args": (*self.vllm_args, *share)})

    @property
    def caches_prefixes(self) -> bool:
        """Whether engines find in their caches what they have read before."""
        return self.engine.kind == "vllm" and "--no-enable-prefix-caching" not in _options(self.vllm_args)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's own, and those of its adapters."""
        return (self.public_name, *(self.engine.lora.adapters if self.engine.lora else ()))

    @field_validator("vllm_args")
    @classmethod
    def _leaves_ours_alone(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        if argv and not argv[0].startswith("-"):
            raise ValueError(f"must begin with an option, got {argv[0]!r}")
        for arg in argv:
            if re.match(r"--?[\w.-]+\s", arg):
                raise ValueError(f"{arg.split()[0]} and what follows it stand in one item: {ARGUMENTS}")
        for name in _options(argv):
            if (why := why_refused(name)) is not None:
                raise ValueError(why)
        return argv

    @model_validator(mode="after")
    def _names_adapters_in_one_place(self) -> Self:
        given = _options(self.vllm_args).keys()
        if self.engine.lora and (clash := given & _LORA_ARGS):
            raise ValueError(f"{sorted(clash)} in vllm_args: engine.lora sets what they say")
        return self

    @model_validator(mode="after")
    def _asks_its_kind_of_engine(self) -> Self:
        engine = self.engine
        if engine.kind == "vllm":
            if unheeded := engine.gang.of_transformers_only():
                raise ValueError(f"engine.gang: {unheeded} are of engine.kind: transformers, and this one is vllm")
            return self
        if engine.prefill:
            raise ValueError("engine.prefill: an engine of kind transformers hands no caches over")
        if engine.placement_group_bundles:
            raise ValueError("engine.placement_group_bundles: an engine of kind transformers runs on one device")
        if engine.lora:
            raise ValueError("engine.lora: an engine of kind transformers serves no adapters")
        if engine.credit_lookahead:
            raise ValueError("engine.credit_lookahead is of no use to engine.kind transformers: it takes whole batches")
        if engine.scheduler != SchedulerSettings():
            raise ValueError("engine.scheduler: an engine of kind transformers has no scheduler, see engine.gang")
        given = _options(self.vllm_args).keys()
        if clash := given & _NOT_FOR_TRANSFORMERS:
            raise ValueError(f"{sorted(clash)} in vllm_args: an engine of kind transformers runs on one device, as is")
        return self

    @model_validator(mode="after")
    def _has_one_scheduler(self) -> Self:
        given = _options(self.vllm_args).keys()
        if self.engine.scheduler.mode != "stock" and (clash := given & {"--scheduler-cls", "--additional-config"}):
            raise ValueError(f"{sorted(clash)} in vllm_args need engine.scheduler.mode: stock")
        return self

    @model_validator(mode="after")
    def _uses_the_gpus_that_it_holds(self) -> Self:
        gpus = self.engine.num_gpus
        used = _gpus_used(self.vllm_args, in_bundles=bool(self.engine.placement_group_bundles))
        if self.engine.kind == "vllm" and gpus >= 1 and used not in (None, gpus):
            raise ValueError(
                f"engine.num_gpus is {gpus:g}, and each engine uses {used} by vllm_args: "
                f"{' times '.join(name for name, _ in _PARALLEL)} must be as many"
            )
        return self

    @model_validator(mode="after")
    def _runs_in_its_bundles(self) -> Self:
        executor = _options(self.vllm_args).get(_EXECUTOR, "ray")
        if self.engine.placement_group_bundles and executor != "ray":
            raise ValueError(
                f"{_EXECUTOR} is {executor}, and engine.placement_group_bundles need ray: leave it out, it is set"
            )
        return self

    @model_validator(mode="after")
    def _moves_caches_one_way(self) -> Self:
        given = _options(self.vllm_args).keys()
        clash = given & {"--kv-transfer-config", "--scheduler-cls", "--additional-config"}
        if self.engine.prefill is not None and clash:
            raise ValueError(f"{sorted(clash)} in vllm_args do not go with engine.prefill, which sets them")
        by_file = self.engine.prefill is not None and self.engine.prefill.connector == "file"
        if by_file and (why := why_one_worker(_workers(self.vllm_args) or 1)) is not None:
            raise ValueError(why)
        return self


class AppConfig(ModelSection):
    """One model behind one address, or several."""

    FIXED: ClassVar[Container[str]] = AllBut({"classes", "default_class", "service_tiers"})

    more_models: tuple[ModelSection, ...] = ()
    """Further models. Each has `model`, `served_model_name`, `vllm_args`, `engine` and `work` of its own, as the first
    has them at the top; everything else is shared."""
    name: str = Field(default="sluice", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Keeps the shared state of several applications apart in one Redis database."""
    redis_url: SecretStr | None = None
    """redis://, rediss:// (TLS) or unix://; null starts an embedded Redis with the application, on one machine only.
    One with a password is named by SLUICE_REDIS_URL instead: Ray logs what stands here."""
    redis_ca_certs: str | None = None
    """File of CA certificates for rediss://."""
    mode: Mode = "full"
    """`full` serves by the policies; `stock` first come, first served, to the replica with the fewest requests;
    `shadow` serves as stock does and counts what the policies would have done."""
    router: RouterSection = RouterSection()
    bins: BinsSection = BinsSection()
    order: OrderSection = OrderSection()
    placement: PlacementSection = PlacementSection()
    keys: KeysSection = KeysSection()
    logs: LogsSection = LogsSection()
    predictor: PredictorSection = PredictorSection()
    batches: BatchesSection = BatchesSection()
    responses: ResponsesSection = ResponsesSection()
    classes: dict[str, ClassSection] = Field(default_factory=_default_classes)
    """Service classes by the names that clients and keys ask for. Whatever stands here replaces all of the default."""
    default_class: str = "standard"
    """Of requests that ask for none, and whose key has none of its own."""
    service_tiers: dict[ServiceTier, str] = {"priority": "interactive", "default": "standard", "flex": "offline"}
    """The class for a `service_tier` in the body of a request that names no class in its header. Tiers that are not
    here are left alone; of the default ones those also whose class is not configured."""

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        return url

    @model_validator(mode="after")
    def _knows_its_default_class(self) -> "AppConfig":
        for name in self.classes:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", name):
                raise ValueError(f"class {name!r} must be a letter and up to 63 letters, digits, - and _")
        if self.default_class not in self.classes:
            raise ValueError(f"default_class {self.default_class!r} is not one of classes {sorted(self.classes)}")
        return self

    @model_validator(mode="after")
    def _knows_the_classes_of_its_tiers(self) -> "AppConfig":
        unknown = {tier: name for tier, name in self.service_tiers.items() if name not in self.classes}
        if "service_tiers" in self.model_fields_set and unknown:
            raise ValueError(f"service_tiers {unknown} name classes that are not among {sorted(self.classes)}")
        return self

    @model_validator(mode="after")
    def _knows_the_class_of_its_batches(self) -> "AppConfig":
        if self.batches.folder is not None and self.batches.slo_class not in self.classes:
            raise ValueError(
                f"batches.slo_class {self.batches.slo_class!r} is not one of classes {sorted(self.classes)}"
            )
        return self

    @property
    def class_of_tier(self) -> dict[str, str]:
        """Of the service tiers whose class is there."""
        return {tier: name for tier, name in self.service_tiers.items() if name in self.classes}

    @model_validator(mode="after")
    def _scales_what_it_counts(self) -> "AppConfig":
        own = sorted(name for name, section in self.classes.items() if section.own_replicas)
        if own and any(section.engine.autoscaling for section in (self, *self.more_models)):
            raise ValueError(f"engine.autoscaling counts all replicas alike: it goes without own_replicas (of {own})")
        return self

    @model_validator(mode="after")
    def _predicts_waits_by_work(self) -> "AppConfig":
        """In the other modes a request counts as one, whatever its work: what waits has no seconds."""
        if self.mode == "full":
            return self
        refusing = sorted(name for name, section in self.classes.items() if section.when_late == "refuse")
        if refusing:
            raise ValueError(
                f"when_late: refuse (of {refusing}) goes by predicted work, which mode: {self.mode} does without"
            )
        if any(section.engine.autoscaling for section in (self, *self.more_models)):
            raise ValueError(f"engine.autoscaling goes by predicted work, which mode: {self.mode} does without")
        return self

    @model_validator(mode="after")
    def _sets_what_its_engines_heed(self) -> "AppConfig":
        kinds = {section.engine.kind for section in (self, *self.more_models)}
        if "transformers" not in kinds and self.bins.dispatch == "requests":
            for name in ("serving", "seconds_per_token", "prompt_buckets", "bucket_rule"):
                if getattr(self.bins, name) != BinsSection.model_fields[name].default:
                    raise ValueError(
                        f"bins.{name} is of batches: it needs bins.dispatch: batches, or an engine.kind: transformers"
                    )
        if "vllm" not in kinds:
            held = sorted(name for name, section in self.classes.items() if section.tpot_s is not None)
            if held:
                raise ValueError(f"tpot_s (of {held}) is held by engines of kind vllm, and there are none")
        return self

    @model_validator(mode="after")
    def _gives_vllm_what_it_is_set_to_take(self) -> "AppConfig":
        engines = [section.engine for section in (self, *self.more_models) if section.engine.kind == "vllm"]
        if self.bins.dispatch == "requests":
            if any(engine.gang != GangSection() for engine in engines):
                raise ValueError(
                    "engine.gang: an engine of kind vllm takes single requests, set bins.dispatch: batches, or "
                    "engine.kind: transformers"
                )
            return self
        if engines and self.mode != "full":
            raise ValueError(f"bins.dispatch: batches is a policy of mode: full, not of mode: {self.mode}")
        if any(engine.prefill for engine in engines):
            raise ValueError(
                "engine.prefill hands a KV cache over as soon as it is read, and with bins.dispatch: batches it would "
                "wait for a batch: leave one of the two out"
            )
        if any(engine.credit_lookahead for engine in engines):
            raise ValueError(
                "engine.credit_lookahead is of no use with bins.dispatch: batches: replicas take whole ones"
            )
        return self

    @model_validator(mode="after")
    def _has_one_order_of_each_class(self) -> "AppConfig":
        by_length = sorted(name for name, section in self.classes.items() if section.order != "deadline")
        if self.order.policy is not None and by_length:
            raise ValueError(f"order.policy orders all requests: it goes without classes.NAME.order (of {by_length})")
        return self

    @model_validator(mode="after")
    def _sees_batches_between_refits(self) -> "AppConfig":
        """Algorithm 1 merges all buckets while fewer prompts than a batch are there."""
        sizes = [section.engine.gang.batch_size for section in (self, *self.more_models)]
        if self.bins.bucket_rule == "literal" and self.bins.refit_every <= max(sizes):
            raise ValueError(
                f"bins.refit_every ({self.bins.refit_every}) must be above engine.gang.batch_size ({max(sizes)}) with "
                "bucket_rule: literal: of fewer prompts it makes one bucket"
            )
        return self

    @model_validator(mode="after")
    def _splits_by_policy(self) -> "AppConfig":
        if self.mode != "full" and any(section.engine.prefill for section in (self, *self.more_models)):
            raise ValueError(f"engine.prefill is a policy of mode: full, not of mode: {self.mode}")
        return self

    @model_validator(mode="after")
    def _tells_models_apart(self) -> "AppConfig":
        names = [name for section in (self, *self.more_models) for name in section.served_names]
        if len(set(names)) < len(names):
            raise ValueError(f"names of models and adapters must differ, got {names}")
        return self

    def named_redis(self) -> str | None:
        """The URL that stands here, or else in the environment of whoever starts the application; a secret."""
        return self.redis_url.get_secret_value() if self.redis_url else os.environ.get(REDIS_URL_ENV)

    def each_model(self) -> list["AppConfig"]:
        """The configuration of every model by itself."""
        own = {name: getattr(self, name) for name in ModelSection.model_fields}
        sections = [own, *({name: getattr(each, name) for name in own} for each in self.more_models)]
        return [self.model_copy(update={**section, "more_models": ()}) for section in sections]

    @property
    def engine_replicas(self) -> int:
        """Shared ones and those of classes, at the start."""
        groups = [group for group in (self.engine, self.engine.prefill) if group is not None]
        return sum(map(least_replicas, groups)) + sum(section.own_replicas for section in self.classes.values())

    @property
    def resources(self) -> dict[str, float]:
        """What all replicas of all models take at the start of Ray's resources, by their names."""
        groups = [
            (least_replicas(self.router), {"CPU": self.router.num_cpus}),
            (self.predictor.own_replicas, {"CPU": self.predictor.num_cpus, "GPU": self.predictor.num_gpus}),
            (int(self.batches.folder is not None), {"CPU": self.batches.num_cpus}),
        ]
        for each in self.each_model():
            groups += each._engine_groups()
        taken: defaultdict[str, float] = defaultdict(float)
        for replicas, resources in groups:
            for name, amount in resources.items():
                taken[name] += replicas * amount
        return dict(taken)

    def _engine_groups(self) -> list[tuple[int, dict[str, float]]]:
        """Of this model: how many replicas, and what each of them takes."""
        engine, prefill = self.engine, self.engine.prefill
        if engine.placement_group_bundles:
            return [(self.engine_replicas, bundle) for bundle in engine.placement_group_bundles]
        cores_and_gpus = {"CPU": engine.num_cpus, "GPU": engine.num_gpus}
        reading = least_replicas(prefill) if prefill else 0
        groups = [(self.engine_replicas - reading, cores_and_gpus | engine.resources)]
        if prefill:
            placed = engine.resources if prefill.resources is None else prefill.resources
            groups.append((reading, cores_and_gpus | placed))
        return groups

    def namespace(self, engine_version: str) -> str:
        """Where the shared state lives: apart for whatever makes answers different.

        In a rolling redeploy with another model, the routers of the new one must not be given replicas of the old one,
        and replicas that move KV caches in another way must not be paired with them. Nor may another version of Sluice
        read tables that it would write otherwise, or keys of two orders share a queue.
        """
        kind = [self.engine.kind] if self.engine.kind != "vllm" else []
        cache = [self.engine.prefill.connector] if self.engine.prefill else []
        order = [self.order.policy, self.order.policy_args] if self.order.policy else []
        what = json.dumps([state_version(), engine_version, self.vllm_argv(), *kind, *cache, *order])
        return f"{self.name}:{hashlib.sha256(what.encode()).hexdigest()[:12]}"

    def prefill_namespace(self, engine_version: str) -> str:
        """Where the shared state of the replicas lives that only prefill."""
        return f"{self.namespace(engine_version)}:prefill"

    def vllm_argv(self) -> list[str]:
        """The arguments for vLLM on both sides."""
        model, args = (str(DEMO_MODEL), DEMO_ARGS) if self.model == DEMO else (self.model, ())
        name = ["--served-model-name", self.public_name] if self.public_name != model else []
        ours = _without(("--disable-log-stats", "--no-enable-log-requests", *args), _options(self.vllm_args))
        lora = self.engine.lora.vllm_argv() if self.engine.lora else []
        return ["--model", model, *name, *ours, *self.vllm_args, *lora]

    @property
    def runs_eagerly(self) -> bool:
        """Whether vLLM is told to compile nothing."""
        return {"--enforce-eager", "--no-enforce-eager"} & _options(self.vllm_argv()).keys() == {"--enforce-eager"}

    def engine_argv(self, role: Role = "decode") -> list[str]:
        """The arguments for vLLM on an engine replica."""
        prefill = self.engine.prefill
        # What this machine's processor does well is no part of the model's identity: machines may differ in it.
        dtype = ["--dtype", cpu_dtype()] if self.model == DEMO and "--dtype" not in _options(self.vllm_args) else []
        placed = [_EXECUTOR, "ray"] if self.engine.placement_group_bundles else []
        transfer = self._transfer_argv(prefill, role) if prefill is not None else []
        argv = [*self.vllm_argv(), *dtype, *placed, *transfer]
        if (settings := self.scheduler_settings(role)) is None:
            return argv
        told = json.dumps({KEY: settings.model_dump(mode="json", exclude_defaults=True) | {"mode": settings.mode}})
        return [*argv, "--scheduler-cls", SCHEDULER_CLASS, "--additional-config", told]

    def scheduler_settings(self, role: Role = "decode") -> SchedulerSettings | None:
        """Of an engine replica; None where it runs vLLM's own scheduler, or none."""
        settings = self.plug_in_settings(role)
        planned = settings.mode != "stock" and self.mode == "full" and self.engine.kind == "vllm"
        return settings if planned or self.engine.prefill is not None else None

    def plug_in_settings(self, role: Role) -> SchedulerSettings:
        """Of an engine replica, if it has loaded the plug-in."""
        prefill = self.engine.prefill
        settings = prefill.scheduler if prefill is not None and role == "prefill" else self.engine.scheduler
        return settings.changed({"classes": sorted({*self.classes, *settings.classes})})

    def _transfer_argv(self, prefill: PrefillSection, role: Role) -> list[str]:
        """Both sides get the same but for what they do: caches go from those that prefill to those that decode."""
        kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
        settings: dict[str, Any] = {"kv_role": kv_role, "kv_load_failure_policy": "recompute"}
        if prefill.connector == "nixl":
            settings["kv_connector"] = "NixlConnector"
            settings["kv_connector_extra_config"] = {"kv_lease_duration": int(prefill.keep_s)}
        else:
            folder = prefill.folder or Path(tempfile.gettempdir(), f"sluice-kv-{os.getuid()}-{self.name}")
            settings["kv_connector"], settings["kv_connector_module_path"] = (
                FILE_CONNECTOR,
                "deployments.engines.vllm.kv_files",
            )
            settings["kv_connector_extra_config"] = {
                "folder": str(folder),
                "max_bytes": prefill.max_folder_bytes,
                "keep_s": prefill.keep_s,
            }
        if self.engine.num_gpus == 0:
            settings["kv_buffer_device"] = "cpu"
        return ["--kv-transfer-config", json.dumps(settings)]

    def itl_targets(self) -> dict[str, float | None]:
        """Of every class, what decode replicas hold."""
        return {name: section.tpot_s or self.engine.scheduler.tpot_s for name, section in self.classes.items()}

    @property
    def gang(self) -> GangSection | None:
        """How engines take batches, None where they take single requests."""
        takes_batches = self.engine.kind == "transformers" or self.bins.dispatch == "batches"
        return self.engine.gang if takes_batches else None

    @property
    def gang_patience_s(self) -> float:
        """For which batches of shorter answers go before one."""
        return self.router.late_patience_s if self.bins.serving == "shortest_first" else 0.0

    @property
    def credit_s(self) -> float | None:
        """Seconds of reading that an engine replica may have before it; None sets no bound."""
        if self.mode != "full" or self.gang is not None or self.engine.credit_s == math.inf:
            return None
        classes = [section for section in self.classes.values() if not section.fills_idle]
        targets_s = [section.ttft_s for section in classes if section.ttft_s is not None]
        return self.engine.credit_s or longest_promise_s(targets_s)

    def credit_lookahead(self, slots: int, credit_s: float | None) -> int:
        """Requests offered to an engine replica beyond so many slots, where `credit_s` is in force."""
        given = self.engine.credit_lookahead
        if given is not None:
            return given
        return lookahead(slots) if credit_s is not None else 0

    def promises(self) -> dict[str, Promise]:
        """By class."""
        return {name: section.promise() for name, section in self.classes.items()}


def checked(settings: Any) -> AppConfig:
    """Raises ConfigError naming each wrong setting by its path, without its value where that may be a secret."""
    try:
        return AppConfig.model_validate(settings)
    except ValidationError as error:
        lines = [f"  {each}" for each in what_is_wrong(error, AppConfig)]
        raise ConfigError("\n".join(["wrong settings:", *lines])) from None
