"""The application's configuration, as it stands in YAML: checked wholly before anything starts.

    applications:
      - name: sluice
        import_path: deployments.app:build
        args: <AppConfig>

Unknown keys are refused with their path. Every default is what `sluice serve` uses.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from policies.multi_bin import MultiBinConfig
from policies.order import VirtualDeadlineConfig
from policies.types import StepCoefficients, StepTimes
from predictor.batching import BatchingConfig
from router.routed_client import RoutedClientConfig

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


DEMO_MODEL = Path(__file__).with_name("demo_model")


class Section(BaseModel):
    """Refuses what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RouterSection(Section):
    """The deployment that speaks HTTP."""

    replicas: int = Field(default=1, ge=1)
    """One front end handles about 13 000 tokens/s per core: several for each fast GPU."""
    num_cpus: float = Field(default=1, ge=0)
    max_ongoing_requests: int = Field(default=10_000, ge=1)
    """HTTP requests that one router replica handles at once; more get 503."""
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    """Longer request bodies get 413."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests that may wait in all bins together; more get 429."""
    max_wait_s: Seconds = 600.0
    """The longest that a request may wait for a replica before it fails."""
    heartbeat_s: Seconds = 1.0
    silence_s: Seconds = 10.0
    """A replica or router without a heartbeat for this long is taken for dead."""

    @model_validator(mode="after")
    def _beats_often_enough(self) -> "RouterSection":
        if self.silence_s < 3 * self.heartbeat_s:
            raise ValueError(f"silence_s ({self.silence_s}) must be at least three heartbeat_s ({self.heartbeat_s})")
        return self

    def build(self) -> RoutedClientConfig:
        return RoutedClientConfig(
            max_waiting=self.max_waiting,
            max_wait_s=self.max_wait_s,
            heartbeat_s=self.heartbeat_s,
            silence_s=self.silence_s,
        )


class EngineSection(Section):
    """The deployment that runs the model."""

    replicas: int = Field(default=1, ge=1)
    num_gpus: float = Field(default=0, ge=0)
    """GPUs for each replica; 0 runs the CPU build."""
    num_cpus: float = Field(default=1, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources for each replica, to place it."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of each replica, on top of what the CPU build needs."""
    bind_host: str | None = None
    """Address on which a replica listens for routers; None is the node's own address in the cluster."""
    credit_lookahead: int = Field(default=0, ge=0)
    """Requests offered to a replica beyond its slots, so that the next one is at hand when one ends."""
    start_timeout_s: Seconds = 1800.0
    """How long loading the model may take."""
    drain_timeout_s: Seconds = 3600.0
    """How long running requests may go on when a replica is told to leave: at least the longest generation."""


class BinsSection(Section):
    """Bins of predicted output length."""

    count: int = Field(default=4, ge=1, le=64)
    rule: Literal["equal_mass", "optimal", "fixed"] = "equal_mass"
    """How edges follow the observed lengths; `optimal` pays for gang batches, `fixed` keeps `edges`."""
    edges: tuple[float, ...] | None = None
    """count + 1 ascending edges in tokens to start with (for ever, with rule `fixed`)."""
    refit_every: int = Field(default=64, ge=1)
    window_requests: int = Field(default=4096, ge=8)

    def build(self) -> MultiBinConfig:
        return MultiBinConfig(
            bins=self.count,
            rule=self.rule,
            initial_edges=self.edges,
            refit_every=self.refit_every,
            window_requests=self.window_requests,
        )

    @model_validator(mode="after")
    def _is_valid(self) -> "BinsSection":
        self.build()
        return self


class ClassSection(Section):
    """A service class."""

    ttft_s: Seconds = 1.0
    """Target for the first token; smaller goes earlier in the queue."""


class OrderSection(Section):
    """Order of waiting requests: a virtual deadline, arrival + class target + weight x predicted work."""

    work_weight: float = Field(default=1.0, ge=0)
    """Seconds of head start that one second less of predicted work is worth."""


class WorkSection(Section):
    """Step times by which predicted work is counted; only their ratios matter while all replicas are alike.

    Defaults: Llama-3.1-8B in bf16 on an H100, beta at context 512, derived from AIConfigurator's kernel tables.
    """

    prefill_s_per_token: float = Field(default=19.1e-6, ge=0)
    decode_step_s: float = Field(default=5.4e-3, ge=0)
    decode_s_per_request: float = Field(default=38e-6, ge=0)
    batch_size: int = Field(default=32, ge=1)
    """Requests that usually share a decode step."""
    default_output_tokens: int = Field(default=256, ge=1)
    """Assumed until a class has been seen."""

    def build(self) -> StepTimes:
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
    """What `sluice predictor train` wrote; None is the one that comes with Sluice."""
    replicas: int = Field(default=1, ge=1)
    num_gpus: float = Field(default=0, ge=0)
    num_cpus: float = Field(default=1, ge=0)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is bfloat16 on GPUs and on processors with instructions for it, where it is several times faster."""
    deadline_s: Seconds = 0.015
    """The longest that a request waits for its prediction."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Tokens scored together; some thousands suit a GPU."""
    max_wait_s: float = Field(default=0.002, ge=0, le=0.1)
    """How long an idle predictor waits for company for a prompt."""
    max_waiting: int = Field(default=256, ge=1)
    """Prompts that may wait for the predictor; for more the histogram stands in at once."""
    cache_entries: int = Field(default=8192, ge=0)

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
        "offline": ClassSection(ttft_s=60.0),
    }


class AppConfig(Section):
    """One model behind one address."""

    model: str
    """A local folder, the name of a model on the hub, or `demo` for the small model that comes with Sluice."""
    name: str = Field(default="sluice", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Keeps the shared state of several applications apart in one Redis database."""
    served_model_name: str | None = None
    """The name that clients use; None is `model`."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments as `vllm serve` takes them, one item each."""
    redis_url: SecretStr | None = None
    """redis://, rediss:// (TLS) or unix://; None starts an embedded Redis with the application, on one machine only."""
    redis_ca_certs: str | None = None
    """File of CA certificates for rediss://."""
    router: RouterSection = RouterSection()
    engine: EngineSection = EngineSection()
    bins: BinsSection = BinsSection()
    order: OrderSection = OrderSection()
    work: WorkSection = WorkSection()
    predictor: PredictorSection = PredictorSection()
    classes: dict[str, ClassSection] = Field(default_factory=_default_classes)
    default_class: str = "standard"

    @field_validator("vllm_args")
    @classmethod
    def _leaves_ours_alone(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        ours = {"--model": "model", "--served-model-name": "served_model_name", "--host": "HTTP options of Serve"}
        ours |= {"--port": "HTTP options of Serve", "--api-server-count": "router.replicas"}
        for arg in argv:
            if (name := arg.split("=")[0].replace("_", "-")) in ours:
                raise ValueError(f"{name} is set by {ours[name]}, not by vllm_args")
        return argv

    @model_validator(mode="after")
    def _knows_its_default_class(self) -> "AppConfig":
        if self.default_class not in self.classes:
            raise ValueError(f"default_class {self.default_class!r} is not one of classes {sorted(self.classes)}")
        return self

    def vllm_argv(self) -> list[str]:
        """The arguments for vLLM on both sides."""
        model = str(DEMO_MODEL) if self.model == "demo" else self.model
        name = ["--served-model-name", self.served_model_name] if self.served_model_name else []
        return ["--model", model, *name, "--disable-log-stats", "--no-enable-log-requests", *self.vllm_args]

    def order_config(self) -> VirtualDeadlineConfig:
        targets = {name: section.ttft_s for name, section in self.classes.items()}
        return VirtualDeadlineConfig(
            class_targets_s=targets,
            default_target_s=targets[self.default_class],
            work_weight=self.order.work_weight,
        )
