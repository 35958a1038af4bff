"""The engines: `engine`, with its gangs, its adapters and the replicas that only read prompts."""

import ipaddress
import json
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from deployments.config.scaling import AutoscalingSection, least_replicas, may_be_none
from deployments.config.scheduler import SchedulerSection
from deployments.config.section import LiveKey, Seconds, Section
from policies.gang.batches import GangConfig
from policies.gang.prefill import PrefillConfig, PrefillMode
from policies.router.prefill_decode import PrefillDecodeConfig, TransferTimes

Bundle = Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]
"""A bundle of a placement group: amounts of Ray resources by name."""
Role = Literal["prefill", "decode"]
"""What an engine replica does; without a prefill group every replica's role is "decode"."""


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
    pack_decode_from: float = Field(default=1.5, ge=1)
    """With `prepacked`, requests share rows of the cache in decode steps as well, where (padded / packed places of the
    cache) / (packed / padded tokens of a step) is at least this; .inf never."""
    flash_attention: bool = True
    """FlashAttention's kernels where they are installed and the model, in 16 bits, can use them; `pack_decode_from`
    does nothing then. false is PyTorch's attention."""
    shrink: bool = True
    """Rows leave the batch as they end; false computes all of them until the longest ends."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a batch's cache may hold, padding included; null is by the memory that is free at the start."""

    def of_transformers_only(self) -> list[str]:
        """Names of settings that differ from their defaults and that an engine of kind vllm would not heed."""
        given = self.model_dump(exclude_defaults=True).keys()
        return sorted(given - {"batch_size", "max_wait_s"})

    def prefill_config(self) -> PrefillConfig:
        return PrefillConfig(
            mode=self.prefill,
            max_pass_tokens=self.max_pass_tokens,
            pack_decode_from=self.pack_decode_from,
        )

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        GangConfig(batch_size=self.batch_size, max_wait_s=self.max_wait_s)
        return self


class PrefillSection(Section):
    """Replicas that only read prompts. `engine.replicas` then decode, and read the prompts that are not worth moving.

    They are placed as those are, with the same GPUs, model and arguments. NIXL moves KV caches from memory to memory.
    """

    replicas: int = Field(default=1, ge=1)
    """Replicas that only read prompts."""
    autoscaling: AutoscalingSection | None = None
    """In place of a fixed number of replicas."""
    resources: dict[str, float] | None = None
    """Custom Ray resources for each of them; null is those of `engine`."""
    keep_s: float = Field(default=30.0, ge=6, allow_inf_nan=False)
    """How long a cache is kept for a replica that has not begun to fetch it. It holds its blocks meanwhile."""
    split: Literal["auto", "always", "never"] = "auto"
    """Which requests are split: with `auto` those whose prompts would break the `tpot_s` of requests that decode."""
    min_prompt_tokens: int = Field(default=256, ge=1)
    """Shorter prompts are never split."""
    max_wait_s: Seconds = 2.0
    """Prompts that would wait longer for these replicas are read by the decode replicas."""
    transfer_s_per_token: float = Field(default=5.2e-6, ge=0, allow_inf_nan=False)
    """Seconds that moving a token of a cache takes; the default is 131 072 bytes over 25 GB/s."""

    def policy(self, max_batch_tokens: int) -> PrefillDecodeConfig:
        return PrefillDecodeConfig(
            mode=self.split,
            min_prompt_tokens=self.min_prompt_tokens,
            max_batch_tokens=max_batch_tokens,
            max_wait_s=self.max_wait_s,
            transfer=TransferTimes(s_per_token=self.transfer_s_per_token),
        )

    def transfer_argv(self, role: Role, num_gpus: float) -> list[str]:
        """Arguments for vLLM; those that prefill and those that decode get the same, but for what they do."""
        settings: dict[str, Any] = {
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector": "NixlConnector",
            "kv_connector_extra_config": {"kv_lease_duration": int(self.keep_s)},
        }
        if num_gpus == 0:
            settings["kv_buffer_device"] = "cpu"
        return ["--kv-transfer-config", json.dumps(settings)]


class OpenAiSection(Section):
    """Servers of others, of any kind and version, that run the model: see docs/guides/any-server.md."""

    urls: tuple[str, ...] = ()
    """Of each server, as `http://10.0.0.7:8000`: what stands before `/v1` of its routes. A replica stands for each."""
    slots: int = Field(default=64, ge=1, le=65536)
    """Requests that each server has at once; those beyond wait here, where promises decide. For vLLM `--max-num-seqs`,
    as far as its memory holds their caches."""
    key_file: str | None = None
    """File with the servers' API key, on every node; null is none."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Tokens of the longest prompt and answer; null is what the servers say."""

    @field_validator("urls")
    @classmethod
    def _can_be_asked(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.username or parts.password:
                raise ValueError("holds a secret, and Ray logs what stands here: name a file in key_file")
            has_host = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            if not has_host or parts.query or parts.fragment:
                raise ValueError(f"must be as http://HOST:PORT, got {url!r}")
            if parts.path.rstrip("/").endswith("/v1"):
                raise ValueError(f"leave /v1 out of {url!r}: routes are put behind it")
        if len(set(urls)) < len(urls):
            raise ValueError("names a server twice")
        return tuple(url.rstrip("/") for url in urls)


class EngineSection(Section):
    """The deployment that runs the model."""

    kind: Literal["vllm", "transformers", "openai"] = "vllm"
    """`transformers` runs any causal model that Hugging Face Transformers loads, in gang batches; `openai` sends
    requests to servers that run already."""
    openai: OpenAiSection = OpenAiSection()
    """The servers of kind openai."""
    gang: GangSection = GangSection()
    """How an engine takes whole batches."""
    replicas: int = Field(default=1, ge=1)
    """Replicas for all classes; `classes.NAME.own_replicas` come on top."""
    autoscaling: AutoscalingSection | None = None
    """In place of a fixed number of replicas."""
    prefill: PrefillSection | None = None
    """A second group of replicas, which only reads prompts; see docs/guides/prefill-decode.md."""
    num_gpus: float = Field(default=0, ge=0)
    """GPUs for each replica; 0 runs the CPU build."""
    num_cpus: float = Field(default=1, ge=0)
    """Cores that Ray reserves for each replica; it may use more."""
    resources: dict[str, float] = {}
    """Custom Ray resources for each replica, to place it."""
    placement_group_bundles: tuple[Bundle, ...] = ()
    """The parts of an engine larger than a node, each on one node, by their Ray resources, as `{GPU: 1}`. A vLLM worker
    runs in each bundle with a GPU. The replica runs in the first, which needs `num_cpus` and `resources` too."""
    placement_group_strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """How Ray places the bundles: `PACK` on as few nodes as it can, `SPREAD` on as many; `STRICT_PACK` on one, and
    `STRICT_SPREAD` each on one of its own, or not at all."""
    env: dict[str, str] = {}
    """Environment of each replica, on top of what the CPU build needs."""
    bind_host: str | None = None
    """Numeric address on which a replica listens, and which routers call; null is the node's own in the cluster."""
    credit_lookahead: int | None = Field(default=None, ge=0)
    """Requests offered to a replica beyond its slots, so that the next one is at hand when one ends. null is an eighth
    of the slots where first tokens are promised and engines are Sluice's own, else 0: an engine that can choose who is
    next keeps more promises."""
    credit_s: LiveKey[float | None] = Field(default=None, gt=0)
    """A replica whose unread prompt tokens take longer than this to read takes nothing more: what waits stays where all
    replicas share it. null is the longest `ttft_s` of the classes that do not fill idle capacity, .inf sets
    no bound."""
    lora: LoraSection | None = None
    """Adapters served beside the model."""
    scheduler: SchedulerSection = SchedulerSection()
    """What each engine step may do; `mode: stock` is plain vLLM."""
    start_timeout_s: Seconds = 1800.0
    """How long loading the model may take."""
    hang_timeout_s: Seconds = 120.0
    """An engine without progress for this long is replaced. Set it above the longest step."""
    drain_timeout_s: Seconds = 3600.0
    """How long running requests may go on when a replica is told to leave. Set it above the longest generation."""

    def groups(self, own_replicas: int) -> list[tuple[int, dict[str, float]]]:
        """How many replicas there are at the start, and what each of them takes of Ray's resources.

        Args:
            own_replicas: those of classes, besides the shared ones.
        """
        answering = least_replicas(self) + own_replicas
        if self.placement_group_bundles:
            return [(answering, bundle) for bundle in self.placement_group_bundles]
        cores_and_gpus = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        groups = [(answering, cores_and_gpus | self.resources)]
        if self.prefill is not None:
            placed = self.resources if self.prefill.resources is None else self.prefill.resources
            groups.append((least_replicas(self.prefill), cores_and_gpus | placed))
        return groups

    @model_validator(mode="before")
    @classmethod
    def _has_a_replica_for_each_server(cls, given: Any) -> Any:
        """Of kind openai, unless it says otherwise."""
        openai = given.get("openai") if isinstance(given, dict) and given.get("kind") == "openai" else None
        urls = openai.get("urls") if isinstance(openai, dict) else None
        return {"replicas": len(urls), **given} if isinstance(urls, list | tuple) and urls else given

    @model_validator(mode="after")
    def _keeps_one_where_prompts_would_wait(self) -> Self:
        if self.prefill is not None and (may_be_none(self) or may_be_none(self.prefill)):
            raise ValueError(
                "autoscaling.min_replicas: 0 does not go with engine.prefill: a prompt that was read would wait for a "
                "replica that starts"
            )
        return self

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
