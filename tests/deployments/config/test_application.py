"""The configuration as YAML gives it: plain mappings."""

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.app import _engine_deployment, _groups, engine_env
from deployments.config import application as config_module
from deployments.config import lengths
from deployments.config.application import AppConfig
from deployments.config.lengths import USUAL_STEP_TIMES
from deployments.config.model import DEMO_ARGS
from policies.router.multi_bin import MultiBin
from policies.router.promise import Promise
from tests.deployments.refused_args import REFUSED_ARGS
from tests.tutorial import ORDER, POLICY, put_on_path


def config(**settings: Any) -> AppConfig:
    return AppConfig.model_validate({"model": "m", **settings})


def refused(**settings: Any) -> dict[str, str]:
    """What is wrong, by path."""
    with pytest.raises(ValidationError) as caught:
        config(**settings)
    return {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}


def nested(path: str, value: Any) -> dict[str, Any]:
    *sections, name = path.split(".")
    settings: dict[str, Any] = {name: value}
    for section in reversed(sections):
        settings = {section: settings}
    return settings


GANGS = {"kind": "transformers"}
SCALED = {"autoscaling": {"max_replicas": 2}}
BY_PROMISES = {"max_replicas": 2, "by": "promises"}
WITH_PREFILL = {"prefill": {}, "scheduler": {"mode": "stock"}}
ADAPTER = {"lora": {"adapters": {"a": "/adapters/a"}}}


def over_two_nodes(**engine: Any) -> dict[str, Any]:
    """An engine on two GPUs, one on each node."""
    bundles = [{"GPU": 1, "CPU": 1, "rack": 1}, {"GPU": 1}]
    return {"num_gpus": 2, "resources": {"rack": 0.5}, "placement_group_bundles": bundles} | engine


@pytest.fixture
def _keep_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch)


def with_bundles(said: str, *argv: str, path: str = "engine", **engine: Any) -> tuple[dict[str, Any], str, str]:
    return {"engine": over_two_nodes(**engine), "vllm_args": argv}, path, said


def gpus(count: int, used: int, *argv: str) -> tuple[dict[str, Any], str, str]:
    return {"engine": {"num_gpus": count}, "vllm_args": argv}, "", f"is {count}, and each engine uses {used}"


def own_policy(said: str, **scheduler: Any) -> tuple[dict[str, Any], str, str]:
    return {"engine": {"scheduler": scheduler}}, "engine.scheduler", said


def own_order(said: str, **order: Any) -> tuple[dict[str, Any], str, str]:
    return {"order": order}, "order", said


def candidate(model: str, **section: Any) -> dict[str, Any]:
    return {"model": model, "candidate": section}


ADAPTERS = {"engine": {"lora": {"adapters": {"sql": "/adapters/sql"}}}}
# What is said, of which settings besides, of which further models.
CANDIDATES: list[tuple[str, dict[str, Any], tuple[dict[str, Any], ...]]] = [
    ("candidate.of of n is z, which is no model here; there are ['m', 'n']", {}, (candidate("n", of="z"),)),
    ("candidate.of of n is n: it is no candidate of itself", {}, (candidate("n", of="n"),)),
    ("is n, which is a candidate itself", {}, (candidate("n", of="m"), candidate("o", of="n"))),
    ("candidates of m is 1.1 together", {}, (candidate("n", of="m", share=0.6), candidate("o", of="m", share=0.5))),
    ("sql, which is no model here", ADAPTERS, (candidate("n", of="sql"),)),
    (
        "candidate.mirror of n sends copies in a class with fills_idle: true; there is none",
        {"classes": {"standard": {}}},
        (candidate("n", of="m", mirror=True),),
    ),
]


# Settings, the path that is said to be wrong, and what is said of it.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    *((nested(path, 1), path, "not permitted") for path in ("nonsense", "engine.nonsense", "work.nonsense")),
    ({"classes": {"standard": {"nonsense": 1}}}, "classes.standard.nonsense", "not permitted"),
    *(({"bins": {"count": 2, "edges": e}}, "bins", "ascending") for e in ([0, 10], [0, 10, 5], [0, 10, 10])),
    ({"batches": {"keep_s": 3600, "max_window_s": 3600}}, "batches", "max_window_s"),
    ({"more_models": [{"model": "m"}]}, "", "must differ"),
    *(({"more_models": list(more), **others}, "", said) for said, others, more in CANDIDATES),
    ({"more_models": [candidate("n", of="m", share=1.1)]}, "more_models.0.candidate.share", "less than or equal to 1"),
    ({"candidate": {"of": "n"}, "more_models": [{"model": "n"}]}, "candidate", "not permitted"),
    ({"vllm_args": ["--block-size", "16"], "engine": {"num_gpus": 0}}, "", "multiples of 32"),
    ({"vllm_args": ["--block_size=48"], "engine": {"num_gpus": 0}}, "", "multiples of 32"),
    # Classes and what goes by predicted work
    *(({"classes": {"standard": {}, name: {}}}, "", "must be a letter") for name in ("-prefill", "2", "a b", "")),
    ({"mode": "stock", "classes": {"standard": {"when_late": "refuse"}}}, "", "predicted work"),
    ({"mode": "shadow", "engine": SCALED}, "", "predicted work"),
    ({"mode": "stock", "more_models": [{"model": "b", "engine": SCALED}]}, "", "predicted work"),
    # Scaling
    ({"engine": {"autoscaling": {"max_replicas": 2, "most_ratio": 0.9}}}, "engine.autoscaling", "by: work"),
    ({"engine": {"autoscaling": BY_PROMISES | {"slot_use": 0.5}}}, "engine.autoscaling", "by: promises"),
    ({"engine": {"autoscaling": BY_PROMISES}, "classes": {"standard": {"ttft_s": None}}}, "", "promises something"),
    (
        {"engine": {"prefill": {"autoscaling": BY_PROMISES}}, "classes": {"standard": {"ttft_s": None}}},
        "",
        "promises something",
    ),
    # Whole batches
    ({"engine": GANGS | {"credit_lookahead": 1}}, "", "whole batches"),
    ({"engine": GANGS, "vllm_args": ["--lora-modules", "a=/adapters/a"]}, "", "--lora-modules"),
    ({"engine": GANGS | {"scheduler": {"mode": "stock"}}}, "", "engine.scheduler"),
    ({"engine": GANGS, "classes": {"standard": {}, "fast": {"tpot_s": 0.05}}}, "", "tpot_s (of ['fast'])"),
    *(
        ({"engine": GANGS, "vllm_args": [argument, "2"]}, "", "one device")
        for argument in ("--tensor-parallel-size=2", "-tp", "--quantization", "--pipeline_parallel_size")
    ),
    ({"engine": {"gang": {"batch_size": 4}}}, "", "bins.dispatch: rolling or batches"),
    ({"bins": {"dispatch": "rolling"}, "mode": "stock"}, "", "bins.dispatch: rolling is a policy of mode: full"),
    ({"bins": {"dispatch": "rolling"}, "engine": {"gang": {"max_wait_s": 1.0}}}, "", "engine.gang.max_wait_s"),
    *(
        ({"bins": {"dispatch": "batches"}, **clash}, "", said)
        for clash, said in (
            ({"mode": "stock"}, "a policy of mode: full"),
            ({"engine": {"prefill": {}}}, "engine.prefill"),
            ({"engine": {"credit_lookahead": 1}}, "engine.credit_lookahead"),
            ({"engine": {"gang": {"prefill": "padded", "shrink": False}}}, "['prefill', 'shrink'] are of engine.kind"),
        )
    ),
    # Rules of the papers
    *(
        ({"papers": {"literal_buckets": True}, **settings}, "", said)
        for settings, said in (
            ({"engine": GANGS}, "bins.prompt_buckets is 1"),
            ({"bins": {"prompt_buckets": 2}}, "bins.prompt_buckets is of batches"),
            (
                {"engine": GANGS | {"gang": {"batch_size": 64}}, "bins": {"prompt_buckets": 2}},
                "bins.refit_every (64) must be above engine.gang.batch_size (64)",
            ),
        )
    ),
    ({"papers": {"refill": 3}, "engine": {"scheduler": {"policy": POLICY}}}, "", f"{POLICY} decides"),
    ({"papers": {"memory": "linear"}, "engine": GANGS}, "", "engines of kind vllm"),
    # Policies of the user's own
    own_policy("No module named 'keep_fre'", policy="keep_fre:KeepFree"),
    own_policy("KeepAll", policy="keep_free:KeepAll"),
    own_policy("no method plan and no method observe", policy=ORDER),
    own_policy("fraction must be above 0 and at most 0.5, got 2", policy=POLICY, policy_args={"fraction": 2}),
    own_policy("part", policy=POLICY, policy_args={"part": 0.2}),
    own_policy(f"admission, overcommit: policy {POLICY}", policy=POLICY, admission="slots", overcommit=False),
    own_policy(f"mode mixed: policy {POLICY} decides", policy=POLICY, mode="mixed"),
    own_policy("policy_args are settings of policy", policy_args={"fraction": 0.2}),
    own_policy("batch policy must be one of auto", policy="fcfs"),
    own_order("No module named 'keep_fre'", policy="keep_fre:Patience"),
    own_order("no method key", policy=POLICY),
    own_order("speed", policy=ORDER, policy_args={"speed": 2}),
    own_order("policy_args are settings of policy", policy_args={"speed": 2}),
    (
        {"order": {"policy": "sjf", "policy_args": {"from": datetime.date(2026, 1, 1)}}},
        "order.policy_args.from",
        "JSON",
    ),
    # Adapters, and replicas that only read prompts
    *(
        ({"engine": {"lora": {"adapters": {name: "/x"}}}, "more_models": [{"model": "other"}]}, "", "must differ")
        for name in ("m", "other")
    ),
    ({"engine": ADAPTER, "vllm_args": ["--enable-lora"]}, "", "engine.lora"),
    ({"mode": "stock", "engine": {"prefill": {}}}, "", "mode: stock"),
    ({"engine": WITH_PREFILL, "vllm_args": ["--kv-transfer-config"]}, "", "engine.prefill"),
    ({"engine": WITH_PREFILL, "vllm_args": ["--scheduler-cls=x"]}, "", "engine.prefill"),
    ({"engine": {"prefill": {"keep_s": 1}}}, "engine.prefill.keep_s", "greater than or equal to 6"),
    # GPUs, which an engine would hold idle or lack
    gpus(4, 1),
    gpus(1, 2, "--tensor-parallel-size", "2"),
    gpus(2, 4, "-tp=2", "--pipeline_parallel_size", "2"),
    gpus(2, 4, "-tp", "2", "--prefill-context-parallel-size", "2"),
    gpus(2, 4, "-pcp", "4"),
    with_bundles("num_gpus is 4, and placement_group_bundles hold 2 GPUs", "-tp", "4", num_gpus=4),
    with_bundles("num_gpus is 2, and each engine uses 4", "-tp", "4", path=""),
    with_bundles("each engine uses 4", "-tp", "4", "--distributed-executor-backend", "ray", path=""),
    with_bundles("placement_group_bundles need", "-tp", "2", "--distributed-executor-backend=mp", path=""),
    with_bundles("one worker in each", placement_group_bundles=[{"GPU": 2, "CPU": 1, "rack": 1}]),
    with_bundles("leave them out", placement_group_bundles=[{"CPU": 1}], num_gpus=0),
    with_bundles("first of placement_group_bundles, which lacks {'CPU': 2.0}", "-tp", "2", num_cpus=2),
    with_bundles("lacks {'shelf': 1.0}", "-tp", "2", resources={"shelf": 1}),
    with_bundles("without placement_group_bundles", "-tp", "2", prefill={}),
    with_bundles("runs on one device", path="", kind="transformers"),
    with_bundles("at least 1 item", path="engine.placement_group_bundles.0", placement_group_bundles=[{}]),
    with_bundles("greater than 0", path="engine.placement_group_bundles.0.GPU", placement_group_bundles=[{"GPU": 0}]),
    with_bundles("'STRICT_SPREAD'", path="engine.placement_group_strategy", placement_group_strategy="CLOSE"),
    with_bundles("there are none", placement_group_bundles=[], placement_group_strategy="SPREAD"),
]


@pytest.mark.usefixtures("_keep_free")
@pytest.mark.parametrize(("settings", "path", "said"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_settings_that_could_not_serve_are_refused_with_their_path(
    settings: dict[str, Any], path: str, said: str
) -> None:
    found = refused(**settings)
    assert list(found) == [path]
    assert said in found[path]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("router.replicas", [0, 1.5, "many"]),
        ("router.num_cpus", [-1]),
        ("router.max_ongoing_requests", [0]),
        ("router.max_body_bytes", [1023]),
        ("classes.standard.max_waiting", [0]),
        ("classes.standard.max_key_share", [0, -0.1, 1.01, math.nan]),
        ("router.max_wait_s", [0, -1, math.inf, math.nan]),
        ("router.silence_s", [0, math.nan]),
        ("engine.replicas", [0]),
        ("engine.num_gpus", [-1]),
        ("engine.num_cpus", [-1]),
        ("engine.credit_lookahead", [-1]),
        ("engine.bind_host", ["0.0.0.0", "::", "localhost", "10.0.0", ""]),
        ("engine.kind", ["tgi"]),
        ("engine.gang.batch_size", [0, 1025]),
        ("engine.gang.max_wait_s", [-1, math.nan]),
        ("engine.gang.prefill", ["packed"]),
        ("engine.gang.max_pass_tokens", [0]),
        ("engine.gang.kv_cache_tokens", [0]),
        ("engine.start_timeout_s", [0]),
        ("engine.drain_timeout_s", [0, math.inf]),
        ("bins.count", [0, 65]),
        ("bins.rule", ["nonsense"]),
        ("bins.refit_every", [0]),
        ("bins.prompt_buckets", [0, 9]),
        ("work.default_output_tokens", [0]),
        ("classes.standard.ttft_s", [0, -1, math.inf]),
        ("name", ["", "a b", "x" * 65, "{brace}"]),
        ("vllm_args", ["--max-model-len 8", ["stray"]]),
        (
            "redis_url",
            [6379, "http://localhost:6379", "localhost", "redis://h:port/0", "redis://[::1", "redis://h:99999"],
        ),
        ("model", [None]),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_path(path: str, values: list[Any]) -> None:
    for value in values:
        assert path in refused(**nested(path, value)), value


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "fd00::7"])
def test_an_engine_may_listen_on_an_address_of_its_own(host: str) -> None:
    assert config(engine={"bind_host": host}).engine.bind_host == host


def test_a_service_tier_of_a_class_that_does_not_exist_is_refused_and_left_out_of_the_default_ones() -> None:
    tiers = {"priority": "gold", "scale": "standard"}
    assert "service_tiers {'priority': 'gold'}" in refused(service_tiers=tiers)[""]
    assert config(classes={"gold": {}, "standard": {}}, service_tiers=tiers).class_of_tier == tiers
    assert config(classes={"standard": {}}).class_of_tier == {"default": "standard"}
    assert "service_tiers" in next(iter(refused(service_tiers={'a"b': "standard"})))


def test_an_option_of_vllm_that_stands_there_twice_is_refused() -> None:
    argv = ["--max-model-len", "8", "--dtype=float32", "--max_model_len=16"]
    assert "names --max-model-len more than once" in refused(vllm_args=argv)["vllm_args"]
    twice = ["--middleware", "a.b", "--middleware", "c.d", "--seed", "-1", "--scale", "-1"]
    assert config(vllm_args=twice).vllm_args == tuple(twice)


def test_a_folder_of_batches_is_the_same_in_every_process_or_refused() -> None:
    assert "'batches'" in refused(batches={"folder": "batches"})["batches.folder"]
    for folder in ("/mnt/batches", "s3://bucket/batches"):
        assert config(batches={"folder": folder}).batches.folder == folder
    for folder in ("sftp://host/batches", "smb://host/batches", "webhdfs://host/batches", "https://host/batches"):
        assert "use a path from the root" in refused(batches={"folder": folder})["batches.folder"]


def test_batches_go_under_a_class_that_there_is_where_there_are_any() -> None:
    classes = {"standard": {}}
    assert "batches.slo_class 'offline'" in refused(classes=classes, batches={"folder": "/b"})[""]
    assert config(classes=classes).batches.folder is None


def test_what_runs_batches_takes_resources_where_there_are_any() -> None:
    assert config(batches={"folder": "/b", "num_cpus": 2}).resources["CPU"] == config().resources["CPU"] + 2


def test_a_default_class_that_does_not_exist_is_refused() -> None:
    assert "'gold'" in refused(default_class="gold")[""]
    assert config(classes={"gold": {}}, default_class="gold").default_class == "gold"


@pytest.mark.parametrize(("argv", "where"), REFUSED_ARGS)
def test_arguments_for_vllm_that_have_a_setting_of_their_own_or_no_effect_are_refused(
    argv: list[str], where: str
) -> None:
    assert where in refused(vllm_args=argv)["vllm_args"]


def test_other_arguments_for_vllm_come_after_ours() -> None:
    argv = config(served_model_name="s", vllm_args=["--max-model-len", "8"]).vllm_argv()
    assert argv[:4] == ["--model", "m", "--served-model-name", "s"]
    assert argv[-2:] == ["--max-model-len", "8"]


def test_another_model_argument_or_engine_version_keeps_its_shared_state_apart() -> None:
    mine = config().namespace("vllm-1")
    assert mine == config(redis_url="redis://elsewhere", engine={"replicas": 3}).namespace("vllm-1")
    others = [config(model="n"), config(name="n"), config(vllm_args=["--dtype", "float32"])]
    assert len({mine, config().namespace("vllm-2"), *(other.namespace("vllm-1") for other in others)}) == 5


def test_another_version_of_the_tables_keeps_its_shared_state_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = config().namespace("vllm-1")
    monkeypatch.setattr("deployments.config.application.state_version", lambda: "of tomorrow")
    assert config().namespace("vllm-1") != mine


def test_defaults_build_what_the_router_needs() -> None:
    made = config()
    assert len(MultiBin(made.bins.build()).edges) == made.bins.count + 1
    assert made.work.build() == USUAL_STEP_TIMES
    targets = [made.promises()[slo_class].ttft_s or 0.0 for slo_class in ("interactive", "standard", "offline")]
    assert targets == sorted(targets)


def test_rolling_batches_are_of_single_requests_and_wait_for_slots_in_the_router() -> None:
    made = config(bins={"dispatch": "rolling"}, engine={"gang": {"batch_size": 6}, "prefill": {}})
    assert (made.rolling_size("decode"), made.rolling_size("prefill"), made.gang) == (6, 1, None)
    assert made.credit_s is not None and made.credit_lookahead(32, made.credit_s) == 0
    assert made.batches_of_bins == made.engine.gang
    plain = config()
    assert (plain.rolling_size("decode"), plain.batches_of_bins) == (1, None)
    assert plain.credit_lookahead(32, plain.credit_s) > 0


def test_gangs_have_edges_of_their_own_and_shared_state_too() -> None:
    plain, gangs = config(), config(engine={"kind": "transformers", "gang": {"batch_size": 16, "max_wait_s": math.inf}})
    assert (plain.gang, plain.bins.build(plain.gang).rule) == (None, "equal_mass")
    assert gangs.gang is not None
    bins = gangs.bins.build(gangs.gang)
    assert (bins.rule, bins.batch_size) == ("optimal", 16)
    assert config(bins={"rule": "equal_mass"}).bins.build(gangs.gang).rule == "equal_mass"
    assert plain.namespace("v") != gangs.namespace("v")
    assert "--scheduler-cls" not in gangs.engine_argv()


@pytest.mark.parametrize(
    ("name", "value"), [("serving", "shortest_first"), ("seconds_per_token", 0.01), ("prompt_buckets", 2)]
)
def test_what_is_of_batches_needs_engines_that_take_them(name: str, value: float | str) -> None:
    assert f"bins.{name} is of batches" in refused(bins={name: value})[""]
    batches = config(bins={name: value, "dispatch": "batches"})
    assert batches.gang is not None
    assert batches.bins.build(batches.gang).seconds_per_token == batches.bins.seconds_per_token
    mixed = config(bins={name: value}, more_models=[{"model": "n", "engine": GANGS}])
    plain, gangs = mixed.each_model()
    assert (plain.gang, plain.bins.build(plain.gang).seconds_per_token) == (None, None)
    assert gangs.bins.build(gangs.gang).seconds_per_token == mixed.bins.seconds_per_token


def test_engines_of_vllm_take_whole_batches_where_they_are_to() -> None:
    gang = {"batch_size": 24, "max_wait_s": 0.5}
    made = config(bins={"dispatch": "batches", "serving": "shortest_first"}, engine={"gang": gang})
    assert made.gang is not None and (made.gang.batch_size, made.gang.max_wait_s) == (24, 0.5)
    bins = made.bins.build(made.gang)
    assert (bins.rule, bins.batch_size) == ("optimal", 24)
    assert (made.credit_s, made.credit_lookahead(24, made.credit_s)) == (None, 0)
    assert made.gang_patience_s == made.router.late_patience_s
    assert config(bins={"dispatch": "batches"}).gang_patience_s == 0.0
    assert "--scheduler-cls" in made.engine_argv()  # inside a batch steps are planned as ever


def test_prompts_are_told_apart_where_it_is_asked_for() -> None:
    found = {}
    for literal in (False, True):
        bins = {"prompt_buckets": 3, "refit_every": 16}
        made = config(engine=GANGS, bins=bins, papers={"literal_buckets": literal})
        assert made.gang is not None
        buckets = made.bins.buckets(made.gang, 8192, literal=made.papers.literal_buckets)
        assert buckets is not None
        for _ in range(16):
            for prompt_tokens in (10, 200, 900, 4000):
                buckets.assign(prompt_tokens)
        found[literal] = buckets.edges
    assert len(found[False]) == 4
    assert found[True] == (0.0, 2048.0, 4096.0, 8192.0), "halves, up to three of them"


def test_every_setting_reaches_what_is_built() -> None:
    made = config(
        router={"max_wait_s": 8.0, "silence_s": 9.0},
        bins={"count": 2, "rule": "fixed", "edges": [0, 10, 20], "refit_every": 3},
        classes={"standard": {"ttft_s": 4.0, "tpot_s": 0.1, "e2e_s": 9.0}, "any-time": {"ttft_s": None}},
    )
    router, bins = made.router.build(), made.bins.build()
    assert (router.max_wait_s, router.heartbeat_s, router.silence_s) == (8.0, 0.9, 9.0)
    assert (bins.bins, bins.rule, bins.refit_every) == (2, "fixed", 3)
    assert MultiBin(bins).edges == (0.0, 10.0, 20.0)
    assert made.promises() == {"standard": Promise(ttft_s=4.0, tpot_s=0.1, e2e_s=9.0), "any-time": Promise()}


@pytest.mark.usefixtures("_keep_free")
def test_policies_of_the_user_s_own_reach_engine_and_router() -> None:
    scheduler = {"policy": POLICY, "policy_args": {"fraction": 0.2}, "max_batch_size": 9}
    order = {"policy": ORDER, "policy_args": {"s_per_1000_tokens": 500}}
    made = config(engine={"scheduler": scheduler}, order=order, classes={"standard": {"tpot_s": 0.05}})
    argv = made.engine_argv()
    told = json.loads(argv[argv.index("--additional-config") + 1])["sluice"]
    assert told == {"mode": "auto", "classes": ["standard"], **scheduler}
    theirs, named = made.order.build(), config(order={"policy": "sjf"}).order.build()
    assert theirs is not None and theirs.key(100.0, "standard", 3.0, 40) == 120.0
    assert named is not None and named.key(100.0, None, 3.0, 40) == 40.0
    assert config().order.build() is None, "what each request is promised decides"


@pytest.mark.usefixtures("_keep_free")
def test_queues_of_two_orders_are_kept_apart() -> None:
    spaces = [
        config(order=order).namespace("1")
        for order in (
            {},
            {"policy": "sjf"},
            {"policy": ORDER},
            {"policy": ORDER, "policy_args": {"s_per_1000_tokens": 2.0}},
        )
    ]
    assert len(set(spaces)) == 4


def test_the_password_of_redis_is_not_shown() -> None:
    made = config(redis_url="redis://:hunter2@redis:6379/0")
    assert "hunter2" not in f"{made!r} {made}"
    for wrong in ({"default_class": "gold"}, {"redis_url": "http://:hunter2@redis"}, {"redis_url": ["hunter2"]}):
        with pytest.raises(ValidationError) as caught:
            config(**{"redis_url": "redis://:hunter2@redis:6379/0", **wrong})
        assert "hunter2" not in str(caught.value)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().router.replicas = 2


@pytest.mark.parametrize(("example", "gpus"), [("local.yaml", 0), ("gpu.yaml", 2), ("papers.yaml", 0)])
def test_the_examples_for_serve_deploy_are_valid(example: str, gpus: int) -> None:
    text = (Path(config_module.__file__).parents[1] / "configs" / example).read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "deployments.app:build"
    assert AppConfig.model_validate(application.args).resources["GPU"] == gpus


def test_every_model_has_its_own_engines_and_shares_the_rest() -> None:
    made = config(
        served_model_name="a",
        more_models=[{"model": "n", "served_model_name": "b", "engine": {"replicas": 3}}],
        router={"max_wait_s": 8.0},
    )
    first, second = made.each_model()
    assert [each.public_name for each in (first, second)] == ["a", "b"]
    assert [each.engine.replicas for each in (first, second)] == [1, 3]
    assert second.router.max_wait_s == 8.0
    assert first.namespace("v") == config(served_model_name="a").namespace("v") != second.namespace("v")
    assert not first.more_models


def test_gpus_are_those_of_engines_of_all_models_and_of_predictors_with_replicas_of_their_own() -> None:
    large = {"model": "n", "engine": {"num_gpus": 4}, "vllm_args": ["--tensor-parallel-size", "4"]}
    engines = {"engine": {"replicas": 2, "num_gpus": 1}, "more_models": [large]}
    predictor = {"kind": "bert", "replicas": 3, "num_gpus": 0.5}
    assert config(**engines).resources["GPU"] == 6
    assert config(**engines, predictor=predictor).resources["GPU"] == 7.5
    for elsewhere in ({"place": "router"}, {"kind": "histogram"}):
        assert config(**engines, predictor=predictor | elsewhere).resources["GPU"] == 6


def test_whole_answers_by_a_time_bring_the_predictor_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cpus(**settings: Any) -> float:
        return config(engine={"num_cpus": 0}, router={"num_cpus": 0}, **settings).resources["CPU"]

    whole = {"classes": {"standard": {}, "agents": {"e2e_s": 8.0}}}
    assert (cpus(), cpus(**whole)) == (0, 1)
    assert cpus(**whole, predictor={"kind": "histogram"}) == cpus(**whole, predictor={"place": "router"}) == 0
    assert cpus(predictor={"kind": "bert"}) == 1
    monkeypatch.setattr(lengths, "find_spec", lambda name: None)
    assert cpus(**whole) == 0


def test_what_the_replicas_take_is_that_of_each_group_times_its_number_at_the_start() -> None:
    made = config(
        engine={
            "replicas": 2,
            "num_cpus": 3,
            "resources": {"rack": 1},
            "prefill": {"autoscaling": {"min_replicas": 2, "max_replicas": 5}, "resources": {"other": 0.5}},
        },
        classes={"standard": {"own_replicas": 1}},
        router={"num_cpus": 2, "autoscaling": {"min_replicas": 3, "max_replicas": 4}},
        predictor={"kind": "bert", "num_cpus": 4},
    )
    assert made.resources == {"CPU": 3 * 2 + 4 + 5 * 3, "GPU": 0, "rack": 3, "other": 1}


def test_an_engine_that_asked_for_no_gpu_sees_none() -> None:
    for kind in ("vllm", "transformers"):
        assert engine_env(config(engine={"kind": kind}))["CUDA_VISIBLE_DEVICES"] == ""
        assert "CUDA_VISIBLE_DEVICES" not in engine_env(config(engine={"kind": kind, "num_gpus": 0.5}))
    assert engine_env(config(engine={"env": {"CUDA_VISIBLE_DEVICES": "1"}}))["CUDA_VISIBLE_DEVICES"] == "1"


def test_ranks_of_an_engine_on_one_host_talk_over_loopback() -> None:
    assert engine_env(config())["GLOO_SOCKET_IFNAME"] == "lo"
    assert engine_env(config(engine={"env": {"GLOO_SOCKET_IFNAME": "eth1"}}))["GLOO_SOCKET_IFNAME"] == "eth1"
    over_hosts = config(engine=over_two_nodes(), vllm_args=["-tp", "2", "--distributed-executor-backend=ray"])
    assert "GLOO_SOCKET_IFNAME" not in engine_env(over_hosts)


@pytest.mark.parametrize(
    ("model", "argv", "compiles"),
    [
        ("demo", (), False),
        ("demo", ("--no-enforce-eager",), True),
        ("another", (), True),
        ("another", ("--max-num-seqs", "4", "--enforce_eager"), False),
    ],
)
def test_an_eager_engine_on_cpus_compiles_nothing_at_all(model: str, argv: tuple[str, ...], compiles: bool) -> None:
    made = config(model=model, vllm_args=argv)
    assert engine_env(made).get("TORCHDYNAMO_DISABLE") == (None if compiles else "1")
    on_gpus = made.model_copy(update={"engine": made.engine.model_copy(update={"num_gpus": 1.0})})
    assert "TORCHDYNAMO_DISABLE" not in engine_env(on_gpus)


@pytest.mark.parametrize(
    ("gpus", "argv"),
    [
        (2, ["-tp", "2"]),
        (4, ["--tensor-parallel-size=2", "-pp", "2"]),
        (8, ["--tensor-parallel-size=2", "--data-parallel-size", "4"]),
        (0.5, []),
        (0, ["-tp", "2"]),
        (8, ["--config", "vllm.yaml"]),
        (1, ["-tp", "2", "--distributed-executor-backend", "ray"]),
        (1, ["-tp", "nonsense"]),  # vLLM will say so
    ],
)
def test_gpus_that_fit_or_that_the_arguments_do_not_tell_are_taken(gpus: float, argv: list[str]) -> None:
    assert config(engine={"num_gpus": gpus}, vllm_args=argv).engine.num_gpus == gpus


@pytest.mark.parametrize(
    "engine",
    [{"prefill": {}}, {"autoscaling": {"max_replicas": 2}}, over_two_nodes()],
    ids=["prefill", "scaled", "nodes"],
)
def test_ranks_are_those_of_one_replica_on_one_node(engine: dict[str, Any]) -> None:
    assert (config(vllm_args=["-dp=4"]).ranks, config().ranks, config(vllm_args=["-dp", "nonsense"]).ranks) == (4, 1, 1)
    argv = ["--data-parallel-size", "2"]
    assert "--data-parallel-size" in refused(engine=engine, vllm_args=argv)[""]


@pytest.mark.parametrize("argv", [["-tp", "2"], ["-pp=2", "--distributed-executor-backend", "ray"], ["--config", "c"]])
def test_an_engine_in_bundles_runs_under_the_executor_that_knows_them(argv: list[str]) -> None:
    made = config(engine=over_two_nodes(), vllm_args=argv)
    told = made.engine_argv()
    assert told[told.index("--distributed-executor-backend") + 1] == "ray"
    assert "CUDA_VISIBLE_DEVICES" not in engine_env(made)
    assert "--distributed-executor-backend" not in config(engine={"num_gpus": 2}, vllm_args=["-tp", "2"]).engine_argv()


def test_an_engine_in_bundles_takes_what_they_hold() -> None:
    made = config(engine=over_two_nodes(replicas=3), vllm_args=["-tp", "2"], router={"num_cpus": 1})
    assert made.resources == {"CPU": 1 + 3, "GPU": 6, "rack": 3}


def test_ray_serve_gives_the_gpus_to_the_bundles_and_none_to_the_replica() -> None:
    made = config(engine=over_two_nodes(placement_group_strategy="SPREAD"), vllm_args=["-tp", "2"])
    replica = _engine_deployment(made, 0, next(_groups(made)))._replica_config
    assert replica.placement_group_bundles == [{"GPU": 1, "CPU": 1, "rack": 1}, {"GPU": 1}]
    assert replica.placement_group_strategy == "SPREAD"
    options = replica.ray_actor_options
    assert (options["num_gpus"], options["num_cpus"], options["resources"]) == (0, 1, {"rack": 0.5})
    alone = config(engine={"num_gpus": 2}, vllm_args=["-tp", "2"])
    replica = _engine_deployment(alone, 0, next(_groups(alone)))._replica_config
    assert (replica.placement_group_bundles, replica.ray_actor_options["num_gpus"]) == (None, 2)


def test_the_demo_model_brings_its_name_and_its_arguments_wherever_it_stands() -> None:
    first, second = config(more_models=[{"model": "demo", "vllm_args": ["--max-model-len", "512"]}]).each_model()
    assert (first.public_name, second.public_name) == ("m", "sluice-demo")
    argv = second.vllm_argv()
    assert argv[argv.index("--served-model-name") + 1] == "sluice-demo"
    assert argv[-len(DEMO_ARGS) :] == [*DEMO_ARGS[2:], "--max-model-len", "512"], "in the place of its own"
    assert config(model="demo", served_model_name="mine").public_name == "mine"


def test_the_precision_of_the_demo_model_is_each_machine_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made, names = config(model="demo"), set()
    for dtype in ("bfloat16", "float32"):
        monkeypatch.setattr("deployments.config.application.cpu_dtype", lambda dtype=dtype: dtype)
        argv = made.engine_argv()
        assert argv[argv.index("--dtype") + 1] == dtype
        names.add(made.namespace("v"))
    assert len(names) == 1
    assert config(model="demo", vllm_args=["--dtype=float16"]).engine_argv().count("--dtype") == 0


def test_adapters_reach_vllm_on_both_sides_and_all_stay_in_memory() -> None:
    lora = {"adapters": {f"a{n}": f"/adapters/{n}" for n in range(6)}, "max_rank": 8, "max_in_step": 2}
    made = config(engine={"lora": lora})
    argv = made.vllm_argv()
    assert argv[argv.index("--enable-lora") :][:7] == [
        "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-cpu-loras", "6",
    ]  # fmt: skip
    assert json.loads(argv[argv.index("--lora-modules") + 1]) == {"name": "a0", "path": "/adapters/0"}
    assert made.engine_argv()[: len(argv)] == argv
    assert made.served_names == ("m", "a0", "a1", "a2", "a3", "a4", "a5")


def argv_of(section: dict[str, Any], role: config_module.Role) -> dict[str, Any]:
    """What both sides of a pair are told about the connector, and the scheduler of one."""
    argv = config(engine={"scheduler": {"mode": "auto"}, "prefill": section}).engine_argv(role)
    transfer = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    scheduler = json.loads(argv[argv.index("--additional-config") + 1])["sluice"]
    return {"transfer": transfer, "scheduler": scheduler, "argv": argv}


def test_both_groups_get_the_same_connector_with_its_two_roles_and_schedulers_of_their_own() -> None:
    reading, answering = (argv_of({"keep_s": 12}, role) for role in ("prefill", "decode"))
    assert reading["transfer"] == answering["transfer"] | {"kv_role": "kv_producer"}
    assert answering["transfer"]["kv_role"] == "kv_consumer"
    assert reading["transfer"]["kv_connector"] == "NixlConnector"
    assert reading["transfer"]["kv_connector_extra_config"] == {"kv_lease_duration": 12}
    assert (reading["scheduler"]["mode"], answering["scheduler"]["mode"]) == ("mixed", "auto")
    assert (reading["scheduler"]["admission"], answering["scheduler"].get("admission")) == ("slots", None)
    stock = config(engine={"scheduler": {"mode": "stock"}, "prefill": {}}).plug_in_settings("prefill")
    assert stock.mode == "stock", "as the other group"


def test_without_a_prefill_group_engines_are_told_of_no_connector() -> None:
    plain = config()
    assert "--kv-transfer-config" not in plain.engine_argv()
    assert plain.engine_replicas == 1
    assert config(engine={"replicas": 3, "prefill": {"replicas": 2}}).engine_replicas == 5
    assert plain.prefill_namespace("v") != plain.namespace("v")


@pytest.mark.parametrize("group", ["engine", "prefill"])
def test_a_last_replica_may_end_where_no_prompt_waits_for_another_one(group: str) -> None:
    none = {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}
    scaled = config(engine=none)
    assert (scaled.engine_replicas, scaled.resources["CPU"]) == (1, config().resources["CPU"]), "at the start"
    engine = {**none, "prefill": {}} if group == "engine" else {"prefill": none}
    assert "engine.prefill" in refused(engine=engine)["engine"]
    assert "min_replicas" in next(iter(refused(router=none)))


def test_the_target_between_tokens_that_decides_is_the_one_that_engines_hold() -> None:
    classes = {"a": {}, "b": {"tpot_s": 0.05}}
    targets = config(engine={"prefill": {}}, classes=classes, default_class="a").itl_targets()
    assert targets == {"a": None, "b": 0.05}


def test_replicas_that_move_caches_have_another_key_space() -> None:
    spaces = {config(engine={"prefill": p}).namespace("v") for p in (None, {}, {"keep_s": 9})}
    assert len(spaces) == 2, "how long caches are kept keeps nobody apart"


def test_a_class_has_an_order_of_its_own_where_it_fills_idle_capacity_and_nothing_else_orders() -> None:
    sorts = {"ttft_s": 600.0, "fills_idle": True, "order": "shortest_first"}
    assert config(classes={"standard": {}, "nightly": sorts}).classes["nightly"].order == "shortest_first"
    assert "set fills_idle: true" in refused(classes={"standard": {"order": "longest_first"}})["classes.standard"]
    own = refused(classes={"standard": {}, "nightly": sorts}, order={"policy": "sjf"})[""]
    assert "goes without classes.NAME.order (of ['nightly'])" in own


def test_a_replica_reads_ahead_for_as_long_as_the_longest_promise_of_a_first_token() -> None:
    classes = {"chat": {"ttft_s": 0.5}, "reports": {"ttft_s": 5.0}, "nightly": {"ttft_s": 600.0, "fills_idle": True}}
    made = config(classes=classes, default_class="chat")
    assert (made.credit_s, made.credit_lookahead(256, 5.0)) == (5.0, 32)
    set_by_hand = config(classes=classes, default_class="chat", engine={"credit_s": 2.0, "credit_lookahead": 3})
    assert (set_by_hand.credit_s, set_by_hand.credit_lookahead(256, 2.0)) == (2.0, 3)
    free = config(classes={"any": {"ttft_s": None}}, default_class="any")
    assert (free.credit_s, free.credit_lookahead(256, None)) == (None, 0)
    assert config(mode="stock", classes=classes, default_class="chat").credit_s is None


def test_prefixes_are_remembered_where_engines_cache_them() -> None:
    assert AppConfig(model="m").caches_prefixes
    assert not AppConfig(model="m", vllm_args=("--no-enable-prefix-caching",)).caches_prefixes
    assert not AppConfig.model_validate({"model": "m", "engine": {"kind": "transformers"}}).caches_prefixes
