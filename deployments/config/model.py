"""A model and its engines."""

import re
from pathlib import Path
from typing import Self

from pydantic import field_validator, model_validator

from deployments.config.engine import EngineSection, GangSection, OpenAiSection
from deployments.config.lengths import WorkSection
from deployments.config.messages import ARGUMENTS
from deployments.config.scheduler import SchedulerSection
from deployments.config.section import Section
from deployments.config.vllm_args import (
    EXECUTOR,
    LORA_ARGS,
    MEMORY,
    NOT_FOR_TRANSFORMERS,
    PARALLEL,
    gpus_used,
    named_twice,
    options,
    ranks_of,
    why_refused,
    without,
)

DEMO = "demo"
DEMO_NAME = "sluice-demo"
DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
DEMO_ARGS = (
    "--max-model-len", "2048", "--max-num-seqs", "64", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20),
    # So small a model, left free to, would fill a JSON answer with blanks.
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip

CPU_BLOCK_TOKENS = 32  # what the attention of vLLM's build for CPUs works in


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
        """With an equal part of the machine's memory for each of `engines` CPU engines, if no argument says how much:
        vLLM would take nearly all of it for each."""
        takes_what_it_needs = self.model == DEMO or self.engine.kind != "vllm" or self.engine.num_gpus
        said = options(self.vllm_args).keys() & MEMORY or "VLLM_CPU_KVCACHE_SPACE" in self.engine.env
        if takes_what_it_needs or said:
            return self
        # Of a machine's memory, for all engines on its processors together: the rest is for routers, Ray and others.
        share = ("--gpu-memory-utilization", f"{0.6 / engines:.3g}")
        return self.model_copy(update={"vllm_args": (*self.vllm_args, *share)})

    @property
    def ranks(self) -> int:
        """Engines of each replica."""
        return ranks_of(self.vllm_args)

    @property
    def caches_prefixes(self) -> bool:
        """Whether engines find in their caches what they have read before."""
        return self.engine.kind != "transformers" and "--no-enable-prefix-caching" not in options(self.vllm_args)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's own, and those of its adapters."""
        return (self.public_name, *(self.engine.lora.adapters if self.engine.lora else ()))

    def vllm_argv(self) -> list[str]:
        """The arguments for vLLM on both sides."""
        model, args = (str(DEMO_MODEL), DEMO_ARGS) if self.model == DEMO else (self.model, ())
        name = ["--served-model-name", self.public_name] if self.public_name != model else []
        ours = without(("--disable-log-stats", "--no-enable-log-requests", *args), options(self.vllm_args))
        lora = self.engine.lora.vllm_argv() if self.engine.lora else []
        return ["--model", model, *name, *ours, *self.vllm_args, *lora]

    @property
    def runs_eagerly(self) -> bool:
        """Whether vLLM is told to compile nothing."""
        return {"--enforce-eager", "--no-enforce-eager"} & options(self.vllm_argv()).keys() == {"--enforce-eager"}

    @field_validator("vllm_args")
    @classmethod
    def _leaves_ours_alone(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        if argv and not argv[0].startswith("-"):
            raise ValueError(f"must begin with an option, got {argv[0]!r}")
        for arg in argv:
            if re.match(r"--?[\w.-]+\s", arg):
                raise ValueError(f"{arg.split()[0]} and what follows it stand in one item: {ARGUMENTS}")
        if (twice := named_twice(argv)) is not None:
            raise ValueError(f"names {twice} more than once: keep one of them")
        for name in options(argv):
            if (why := why_refused(name)) is not None:
                raise ValueError(why)
        return argv

    @model_validator(mode="after")
    def _names_adapters_in_one_place(self) -> Self:
        given = options(self.vllm_args).keys()
        if self.engine.lora and (clash := given & LORA_ARGS):
            raise ValueError(f"{sorted(clash)} in vllm_args: engine.lora sets what they say")
        return self

    @model_validator(mode="after")
    def _asks_its_kind_of_engine(self) -> Self:
        engine = self.engine
        if engine.kind == "openai":
            _check_openai(self)
            return self
        if engine.openai != OpenAiSection():
            raise ValueError(f"engine.openai: its servers are of engine.kind: openai, and this one is {engine.kind}")
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
        if engine.scheduler != SchedulerSection():
            raise ValueError("engine.scheduler: an engine of kind transformers has no scheduler, see engine.gang")
        given = options(self.vllm_args).keys()
        if clash := given & NOT_FOR_TRANSFORMERS:
            raise ValueError(f"{sorted(clash)} in vllm_args: an engine of kind transformers runs on one device, as is")
        return self

    @model_validator(mode="after")
    def _has_one_scheduler(self) -> Self:
        given = options(self.vllm_args).keys()
        if self.engine.scheduler.mode != "stock" and (clash := given & {"--scheduler-cls", "--additional-config"}):
            raise ValueError(f"{sorted(clash)} in vllm_args need engine.scheduler.mode: stock")
        return self

    @model_validator(mode="after")
    def _uses_the_gpus_that_it_holds(self) -> Self:
        gpus = self.engine.num_gpus
        used = gpus_used(self.vllm_args, in_bundles=bool(self.engine.placement_group_bundles))
        if self.engine.kind == "vllm" and gpus >= 1 and used not in (None, gpus):
            raise ValueError(
                f"engine.num_gpus is {gpus:g}, and each engine uses {used} by vllm_args: "
                f"{' times '.join(name for name, _ in PARALLEL)} must be as many"
            )
        return self

    @model_validator(mode="after")
    def _places_its_ranks(self) -> Self:
        if self.ranks == 1:
            return self
        for name in ("prefill", "placement_group_bundles", "autoscaling"):
            if getattr(self.engine, name):
                raise ValueError(f"--data-parallel-size in vllm_args does not go with engine.{name}")
        return self

    @model_validator(mode="after")
    def _has_blocks_that_its_device_takes(self) -> Self:
        size = options(self.vllm_args).get("--block-size", "")
        on_cpus = self.engine.kind == "vllm" and self.engine.num_gpus == 0 and not self.engine.placement_group_bundles
        if on_cpus and size.isdecimal() and int(size) % CPU_BLOCK_TOKENS:
            raise ValueError(
                f"--block-size {size} in vllm_args: vLLM on CPUs takes multiples of {CPU_BLOCK_TOKENS} only; without "
                "the option it takes what the model needs"
            )
        return self

    @model_validator(mode="after")
    def _runs_in_its_bundles(self) -> Self:
        executor = options(self.vllm_args).get(EXECUTOR, "ray")
        if self.engine.placement_group_bundles and executor != "ray":
            raise ValueError(
                f"{EXECUTOR} is {executor}, and engine.placement_group_bundles need ray: leave it out, it is set"
            )
        return self

    @model_validator(mode="after")
    def _moves_caches_one_way(self) -> Self:
        given = options(self.vllm_args).keys()
        clash = given & {"--kv-transfer-config", "--scheduler-cls", "--additional-config"}
        if self.engine.prefill is not None and clash:
            raise ValueError(f"{sorted(clash)} in vllm_args do not go with engine.prefill, which sets them")
        return self


def _check_openai(section: ModelSection) -> None:
    """Raises ValueError for what servers of others do not heed."""
    engine, default = section.engine, EngineSection()
    if not engine.openai.urls:
        raise ValueError("engine.openai.urls: an engine of kind openai is a server that runs already, name it here")
    if section.model == DEMO:
        raise ValueError("model: name the model as its servers call it")
    if section.vllm_args:
        raise ValueError("vllm_args: servers of engine.kind: openai have their own arguments")
    if engine.replicas != len(engine.openai.urls):
        raise ValueError(
            f"engine.replicas is {engine.replicas}, and engine.openai.urls names {len(engine.openai.urls)} servers: "
            "leave it out"
        )
    names = ("autoscaling", "prefill", "num_gpus", "placement_group_bundles", "lora", "scheduler")
    unheeded = [name for name in names if getattr(engine, name) != getattr(default, name)]
    if engine.gang != GangSection():
        unheeded.append("gang")
    if unheeded:
        raise ValueError(f"engine.{unheeded[0]} is of engines that Sluice runs, and servers of kind openai are others'")
