"""The configuration as YAML gives it: plain mappings."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments import config as config_module
from deployments.config import AppConfig
from policies.multi_bin import MultiBin
from policies.order import VirtualDeadline


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


@pytest.mark.parametrize(
    "path",
    ["nonsense", "router.nonsense", "engine.nonsense", "bins.nonsense", "order.nonsense", "work.nonsense"],
)
def test_an_unknown_key_is_refused_with_its_path(path: str) -> None:
    assert refused(**nested(path, 1)) == {path: "Extra inputs are not permitted"}


def test_an_unknown_key_of_a_class_is_refused_with_its_path() -> None:
    assert "classes.standard.nonsense" in refused(classes={"standard": {"nonsense": 1}})


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("router.replicas", [0, 1.5, "many"]),
        ("router.num_cpus", [-1]),
        ("router.max_ongoing_requests", [0]),
        ("router.max_body_bytes", [1023]),
        ("classes.standard.max_waiting", [0]),
        ("router.max_wait_s", [0, -1, math.inf, math.nan]),
        ("router.heartbeat_s", [0, math.inf]),
        ("router.silence_s", [0, math.nan]),
        ("engine.replicas", [0]),
        ("engine.num_gpus", [-1]),
        ("engine.num_cpus", [-1]),
        ("engine.credit_lookahead", [-1]),
        ("engine.start_timeout_s", [0]),
        ("engine.drain_timeout_s", [0, math.inf]),
        ("bins.count", [0, 65]),
        ("bins.rule", ["nonsense"]),
        ("bins.refit_every", [0]),
        ("bins.window_requests", [7]),
        ("order.work_weight", [-1, math.nan, math.inf]),
        ("work.prefill_s_per_token", [-1, math.inf]),
        ("work.decode_step_s", [-1, math.inf]),
        ("work.decode_s_per_request", [-1, math.inf]),
        ("work.batch_size", [0]),
        ("work.default_output_tokens", [0]),
        ("classes.standard.ttft_s", [0, -1, math.inf]),
        ("name", ["", "a b", "x" * 65, "{brace}"]),
        ("vllm_args", ["--max-model-len 8", ["stray"]]),
        ("redis_url", [6379, "http://localhost:6379", "localhost"]),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_path(path: str, values: list[Any]) -> None:
    for value in values:
        assert path in refused(**nested(path, value)), value


def test_the_model_must_be_named() -> None:
    with pytest.raises(ValidationError, match="model"):
        AppConfig.model_validate({})


def test_a_silence_shorter_than_three_heartbeats_is_refused() -> None:
    wrong = refused(router={"heartbeat_s": 2.0, "silence_s": 5.0})
    assert "silence_s (5.0) must be at least three heartbeat_s (2.0)" in wrong["router"]


@pytest.mark.parametrize("edges", [[0, 10], [0, 10, 5], [0, 10, 10]])
def test_edges_that_do_not_fit_the_bins_are_refused(edges: list[float]) -> None:
    assert "ascending" in refused(bins={"count": 2, "edges": edges})["bins"]


def test_a_default_class_that_does_not_exist_is_refused() -> None:
    assert "'gold'" in refused(default_class="gold")[""]
    assert config(classes={"gold": {}}, default_class="gold").default_class == "gold"


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        (["--model", "other"], "model"),
        (["--served-model-name=x"], "served_model_name"),
        (["--served_model_name", "x"], "served_model_name"),
        (["--max-model-len", "8", "--port", "1"], "HTTP options"),
        (["--host=0.0.0.0"], "HTTP options"),
        (["--api-server-count", "4"], "router.replicas"),
    ],
)
def test_arguments_for_vllm_that_have_a_setting_of_their_own_are_refused(argv: list[str], where: str) -> None:
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


def test_defaults_build_what_the_router_needs() -> None:
    made = config()
    assert len(MultiBin(made.bins.build()).edges) == made.bins.count + 1
    assert made.work.build().decode.overhead_s == made.work.decode_step_s
    order = VirtualDeadline(made.order_config())
    keys = [order.key(0.0, slo_class, 1.0, 10) for slo_class in ("interactive", "standard", "offline")]
    assert keys == sorted(keys)


def test_every_setting_reaches_what_is_built() -> None:
    made = config(
        router={"max_wait_s": 8.0, "heartbeat_s": 0.5, "silence_s": 9.0},
        bins={"count": 2, "rule": "fixed", "edges": [0, 10, 20], "refit_every": 3, "window_requests": 11},
        order={"work_weight": 2.5},
        classes={"standard": {"ttft_s": 4.0}},
    )
    router, bins, order = made.router.build(), made.bins.build(), made.order_config()
    assert (router.max_wait_s, router.heartbeat_s, router.silence_s) == (8.0, 0.5, 9.0)
    assert (bins.bins, bins.rule, bins.refit_every, bins.window_requests) == (2, "fixed", 3, 11)
    assert MultiBin(bins).edges == (0.0, 10.0, 20.0)
    assert (order.work_weight, order.default_target_s, dict(order.class_targets_s)) == (2.5, 4.0, {"standard": 4.0})


def test_the_password_of_redis_is_not_shown() -> None:
    made = config(redis_url="redis://:hunter2@redis:6379/0")
    assert "hunter2" not in f"{made!r} {made}"


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().router.replicas = 2


def test_the_example_for_serve_deploy_is_valid() -> None:
    example = Path(config_module.__file__).with_name("configs") / "local.yaml"
    (application,) = yaml.safe_load(example.read_text())["applications"]
    assert application["import_path"] == "deployments.app:build"
    AppConfig.model_validate(application["args"])


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


def test_two_models_of_one_name_are_refused() -> None:
    assert "must differ" in refused(more_models=[{"model": "m"}])[""]
