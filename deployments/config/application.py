"""The application's configuration, as it stands in YAML: checked wholly before anything starts.

    applications:
      - name: sluice
        import_path: deployments.app:build
        args: <AppConfig>

Unknown keys are refused with their path. Every default is what `sluice serve` uses.
"""

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator

from deployments.config.candidate import MoreModelSection, check_candidates
from deployments.config.classes import DEFAULT_CLASSES, ClassSection, OrderSection
from deployments.config.dispatch import check_dispatch
from deployments.config.engine import GangSection, Role
from deployments.config.lengths import BinsSection, PredictorSection
from deployments.config.messages import what_is_wrong
from deployments.config.model import DEMO, ModelSection
from deployments.config.router import RouterSection
from deployments.config.scaling import least_replicas
from deployments.config.scheduler import KEY, SCHEDULER_CLASS, SchedulerSettings
from deployments.config.section import LiveKey
from deployments.config.services import BatchesSection, KeysSection, LogsSection, ResponsesSection
from deployments.config.vllm_args import EXECUTOR, options
from deployments.process.environment import REDIS_URL_ENV
from deployments.process.vllm_env import cpu_dtype
from policies.errors import ConfigError
from policies.papers.auto_literal import PapersConfig
from policies.router.credit import longest_promise_s, lookahead
from policies.router.promise import NO_PROMISE, Promise
from router.classifier import Mode
from router.redis_store import state_version

ServiceTier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
"""OpenAI's, or another word; it stands in answers as it is."""
DEFAULT_TIERS: dict[ServiceTier, str] = {"priority": "interactive", "default": "standard", "flex": "offline"}


def _checked_redis_url(url: SecretStr) -> SecretStr:
    """Raises ValueError, which does not show it: it may hold a password."""
    if not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("must begin with redis://, rediss:// or unix://")
    try:
        _ = urlsplit(url.get_secret_value()).port
    except ValueError:
        raise ValueError("is no address of a Redis, as redis://HOST:PORT/DATABASE") from None
    return url


class AppConfig(ModelSection):
    """One model behind one address, or several."""

    more_models: tuple[MoreModelSection, ...] = ()
    """Further models. Each has `model`, `served_model_name`, `vllm_args`, `engine` and `work` of its own, as the first
    has them at the top; everything else is shared."""
    name: str = Field(default="sluice", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Keeps the shared state of several applications apart in one Redis database."""
    redis_url: Annotated[SecretStr, AfterValidator(_checked_redis_url)] | None = None
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
    keys: KeysSection = KeysSection()
    logs: LogsSection = LogsSection()
    predictor: PredictorSection = PredictorSection()
    papers: PapersConfig = PapersConfig()
    batches: BatchesSection = BatchesSection()
    responses: ResponsesSection = ResponsesSection()
    classes: LiveKey[dict[str, ClassSection]] = DEFAULT_CLASSES
    """Service classes by the names that clients and keys ask for. Whatever stands here replaces all of the default."""
    default_class: LiveKey[str] = "standard"
    """The class of requests that name none and whose API key has none."""
    service_tiers: LiveKey[dict[ServiceTier, str]] = {
        "priority": "interactive",
        "default": "standard",
        "flex": "offline",
    }
    """The class for a `service_tier` in the body of a request that names no class in its header. Tiers that are not
    here are left alone; of the default ones those also whose class is not configured."""

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
        """The class of each service tier, for tiers whose class is configured."""
        return {tier: name for tier, name in self.service_tiers.items() if name in self.classes}

    @model_validator(mode="after")
    def _scales_what_it_counts(self) -> "AppConfig":
        own = sorted(name for name, section in self.classes.items() if section.own_replicas)
        if own and any(section.engine.autoscaling for section in self._models):
            raise ValueError(f"engine.autoscaling counts all replicas alike: it goes without own_replicas (of {own})")
        groups = (group for section in self._models for group in (section.engine, section.engine.prefill) if group)
        by_promises = any(group.autoscaling and group.autoscaling.by == "promises" for group in groups)
        if by_promises and not any(section.promise() != NO_PROMISE for section in self.classes.values()):
            raise ValueError("autoscaling by: promises needs a class that promises something: ttft_s, tpot_s or e2e_s")
        return self

    @model_validator(mode="after")
    def _predicts_waits_by_work(self) -> "AppConfig":
        """In the other modes every request counts as one, so the queue has no length in seconds."""
        if self.mode == "full":
            return self
        refusing = sorted(name for name, section in self.classes.items() if section.when_late == "refuse")
        if refusing:
            raise ValueError(
                f"when_late: refuse (of {refusing}) goes by predicted work, which mode: {self.mode} does without"
            )
        if any(section.engine.autoscaling for section in self._models):
            raise ValueError(f"engine.autoscaling goes by predicted work, which mode: {self.mode} does without")
        if any(section.engine.prefill for section in self._models):
            raise ValueError(f"engine.prefill is a policy of mode: full, not of mode: {self.mode}")
        return self

    @model_validator(mode="after")
    def _sets_what_its_engines_heed(self) -> "AppConfig":
        kinds = {section.engine.kind for section in self._models}
        _check_servers_of_others(self, kinds)
        if "transformers" not in kinds and self.bins.dispatch == "requests":
            for name in ("serving", "seconds_per_token", "prompt_buckets"):
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
        check_dispatch(
            self.bins, self.mode, [section.engine for section in self._models if section.engine.kind == "vllm"]
        )
        return self

    @model_validator(mode="after")
    def _has_one_order_of_each_class(self) -> "AppConfig":
        by_length = sorted(name for name, section in self.classes.items() if section.order != "deadline")
        if self.order.policy is not None and by_length:
            raise ValueError(f"order.policy orders all requests: it goes without classes.NAME.order (of {by_length})")
        return self

    @model_validator(mode="after")
    def _halves_buckets_that_are_there(self) -> "AppConfig":
        """Algorithm 1 merges all buckets while fewer prompts than a batch are there."""
        if not self.papers.literal_buckets:
            return self
        if self.bins.prompt_buckets == 1:
            raise ValueError(
                "papers.literal_buckets halves nothing while bins.prompt_buckets is 1: set the most of them"
            )
        sizes = [section.engine.gang.batch_size for section in self._models]
        if self.bins.refit_every <= max(sizes):
            raise ValueError(
                f"bins.refit_every ({self.bins.refit_every}) must be above engine.gang.batch_size ({max(sizes)}) with "
                "papers.literal_buckets: of fewer prompts it makes one bucket"
            )
        return self

    @model_validator(mode="after")
    def _has_engines_for_its_rules(self) -> "AppConfig":
        if replace(self.papers, literal_buckets=False) == PapersConfig():
            return self
        engines = [section.engine for section in self._models]
        if own := [engine.scheduler.policy for engine in engines if engine.scheduler.policy]:
            raise ValueError(f"papers: engine.scheduler.policy {own[0]} decides, leave one of the two out")
        if all(engine.kind != "vllm" for engine in engines):
            raise ValueError("papers: its rules are of steps of engines of kind vllm, and there are none")
        return self

    @model_validator(mode="after")
    def _tells_models_apart(self) -> "AppConfig":
        names = [name for section in self._models for name in section.served_names]
        if len(set(names)) < len(names):
            raise ValueError(f"names of models and adapters must differ, got {names}")
        check_candidates(self, self.more_models, self.classes)
        return self

    def named_redis(self) -> str | None:
        """The URL that stands here, or else in the environment in which the application is started; a secret."""
        return self.redis_url.get_secret_value() if self.redis_url else os.environ.get(REDIS_URL_ENV)

    @property
    def _models(self) -> tuple[ModelSection, ...]:
        return (self, *self.more_models)

    def each_model(self) -> list["AppConfig"]:
        """The configuration of every model by itself."""
        own = {name: getattr(self, name) for name in ModelSection.model_fields}
        sections = [own, *({name: getattr(each, name) for name in own} for each in self.more_models)]
        return [self.model_copy(update={**section, "more_models": ()}) for section in sections]

    @property
    def engine_replicas(self) -> int:
        """Shared ones and those of classes, at the start."""
        own = sum(section.own_replicas for section in self.classes.values())
        reading = least_replicas(self.engine.prefill) if self.engine.prefill else 0
        return least_replicas(self.engine) + reading + own

    @property
    def resources(self) -> dict[str, float]:
        """Ray's resources, by name, that all replicas of all models take at the start."""
        groups = [
            (least_replicas(self.router), {"CPU": self.router.num_cpus}),
            self.predictor.group(self.promises().values()),
            (int(self.batches.folder is not None), {"CPU": self.batches.num_cpus}),
        ]
        own = sum(section.own_replicas for section in self.classes.values())
        groups += [group for model in self._models for group in model.engine.groups(own)]
        taken: defaultdict[str, float] = defaultdict(float)
        for replicas, resources in groups:
            for name, amount in resources.items():
                taken[name] += replicas * amount
        return dict(taken)

    def namespace(self, engine_version: str) -> str:
        """The name of the shared state, another one for every setting that makes answers different.

        In a rolling redeploy with another model, the routers of the new one must not be given replicas of the old one,
        and replicas that move KV caches in another way must not be paired with them. Nor may another version of Sluice
        read tables that it would write otherwise, or keys of two orders share a queue.
        """
        kind = [self.engine.kind] if self.engine.kind != "vllm" else []
        cache = ["prefill"] if self.engine.prefill else []
        order = [self.order.policy, self.order.policy_args] if self.order.policy else []
        what = json.dumps([state_version(), engine_version, self.vllm_argv(), *kind, *cache, *order])
        return f"{self.name}:{hashlib.sha256(what.encode()).hexdigest()[:12]}"

    def prefill_namespace(self, engine_version: str) -> str:
        """Where the shared state of the replicas lives that only prefill."""
        return f"{self.namespace(engine_version)}:prefill"

    def engine_argv(self, role: Role = "decode") -> list[str]:
        """The arguments for vLLM on an engine replica."""
        prefill = self.engine.prefill
        # What this machine's processor does well is no part of the model's identity: machines may differ in it.
        dtype = ["--dtype", cpu_dtype()] if self.model == DEMO and "--dtype" not in options(self.vllm_args) else []
        placed = [EXECUTOR, "ray"] if self.engine.placement_group_bundles else []
        transfer = prefill.transfer_argv(role, self.engine.num_gpus) if prefill is not None else []
        argv = [*self.vllm_argv(), *dtype, *placed, *transfer]
        if (settings := self.scheduler_settings(role)) is None:
            return argv
        told = json.dumps({KEY: settings.model_dump(mode="json", exclude_defaults=True) | {"mode": settings.mode}})
        return [*argv, "--scheduler-cls", SCHEDULER_CLASS, "--additional-config", told]

    def scheduler_settings(self, role: Role = "decode") -> SchedulerSettings | None:
        """Settings of an engine replica's scheduler; None where it runs vLLM's own, or has none."""
        settings = self.plug_in_settings(role)
        planned = settings.mode != "stock" and self.mode == "full" and self.engine.kind == "vllm"
        return settings if planned or self.engine.prefill is not None else None

    def plug_in_settings(self, role: Role) -> SchedulerSettings:
        """Settings of an engine replica that has loaded the plug-in."""
        told: dict[str, Any] = {
            **self.engine.scheduler.model_dump(),
            "classes": sorted(self.classes),
            "late_patience_s": self.router.late_patience_s,
            "profile": self.work.profile,
            "papers": replace(self.papers, literal_buckets=False),  # which routers follow
        }
        if self.engine.prefill is not None and role == "prefill":
            # Its answers end with their first token: there are no lengths to foresee, and no decodes to keep apart.
            mode = "stock" if self.engine.scheduler.mode == "stock" else "mixed"
            kept = ("max_batch_size", "classes", "late_patience_s")
            told = {"mode": mode, "admission": "slots", **{name: told[name] for name in kept}}
        return SchedulerSettings.parse(told)

    def itl_targets(self) -> dict[str, float | None]:
        """Seconds between tokens that decode replicas keep, by class."""
        return {name: section.tpot_s for name, section in self.classes.items()}

    @property
    def gang(self) -> GangSection | None:
        """How engines take batches, None where they take single requests."""
        takes_batches = self.engine.kind == "transformers" or self.bins.dispatch == "batches"
        return self.engine.gang if takes_batches else None

    def rolling_size(self, role: Role) -> int:
        """Of the rolling batches that engines take; 1 takes single requests as they come."""
        rolls = self.bins.dispatch == "rolling" and self.engine.kind == "vllm" and role != "prefill"
        return self.engine.gang.batch_size if rolls else 1

    @property
    def batches_of_bins(self) -> GangSection | None:
        """How requests of one bin go together, whole or rolling; None where each goes by itself."""
        return self.gang if self.bins.dispatch == "requests" else self.engine.gang

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
        targets_s = [min(section.ttft_s or math.inf, section.e2e_s or math.inf) for section in classes]
        return self.engine.credit_s or longest_promise_s(targets_s)

    def credit_lookahead(self, slots: int, credit_s: float | None) -> int:
        """Requests that an engine replica is offered beyond its `slots`, while `credit_s` is in force."""
        if (given := self.engine.credit_lookahead) is not None:
            return given
        # The queue of a server of others is first come, first served, and a rolling batch waits for slots.
        waits_here = self.engine.kind == "openai" or self.bins.dispatch == "rolling"
        return 0 if credit_s is None or waits_here else lookahead(slots)

    def promises(self) -> dict[str, Promise]:
        """What each class is promised, by its name."""
        return {name: section.promise() for name, section in self.classes.items()}


def _check_servers_of_others(config: AppConfig, kinds: Collection[str]) -> None:
    """Raises ValueError for what they do not do, where they are among these kinds of engines."""
    if "openai" not in kinds:
        return
    if config.bins.dispatch == "batches":
        raise ValueError("bins.dispatch: batches: servers of engine.kind: openai take single requests")
    if own := sorted(name for name, section in config.classes.items() if section.own_replicas):
        raise ValueError(f"own_replicas (of {own}): servers of engine.kind: openai are there for all classes")


def checked(settings: Any) -> AppConfig:
    """Raises ConfigError naming each wrong setting by its path, without its value where that may be a secret."""
    try:
        return AppConfig.model_validate(settings)
    except ValidationError as error:
        lines = [f"  {each}" for each in what_is_wrong(error, AppConfig)]
        raise ConfigError("\n".join(["wrong settings:", *lines])) from None
