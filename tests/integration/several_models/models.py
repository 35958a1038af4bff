"""Settings of the application of this folder: three models behind one address, for holders of keys.

The first has a cache for a few answers, the second adapters and replicas that follow the load, the third gang batches.
"""

from pathlib import Path
from typing import Any

import yaml

from deployments.config.model import DEMO_MODEL
from deployments.http.keys import digest, new_key
from tests.adapters import write_adapter

KEY, NIGHT_KEY = new_key(), new_key()
TIGHT, SCALED, GANGS = "sluice-demo", "second", "gangs"
TIGHT_SLOTS = 32
# So long that a machine that stands still for seconds lets a test fill a batch, and one request waits it out.
GANG_SIZE, GANG_WAIT_S = 3, 15.0
EDGE_TOKENS = 18.0


def settings(folder: Path) -> dict[str, Any]:
    return {
        "keys": {"file": str(_keys(folder))},
        "bins": {"count": 2, "rule": "fixed", "edges": [0.0, EDGE_TOKENS, 100_000.0]},
        # A deadline that a busy machine keeps as well.
        "predictor": {"kind": "bert", "deadline_s": 30.0, "num_cpus": 0},
        **_tight(),
        "more_models": [_scaled(folder), _gangs()],
    }


def _keys(folder: Path) -> Path:
    keys = folder / "keys.yaml"
    night = {"name": "night", "sha256": digest(NIGHT_KEY), "classes": ["offline"], "requests_per_minute": 1}
    keys.write_text(yaml.safe_dump([{"name": "all", "sha256": digest(KEY)}, night]))
    return keys


def _tight() -> dict[str, Any]:
    """A cache for some nine answers of 96 tokens, and no more at once: where preemptions are cheap, more would come."""
    cache = ["--max-model-len", "512", "--block-size", "32", "--num-gpu-blocks-override", "36"]
    engine = {"replicas": 1, "scheduler": {"overcommit": False}}
    return {"engine": engine, "vllm_args": ["--max-num-seqs", str(TIGHT_SLOTS), *cache]}


def _scaled(folder: Path) -> dict[str, Any]:
    adapters = {
        name: str(write_adapter(folder / name, DEMO_MODEL, strength=strength))
        for name, strength in (("changed", 1.0), ("unchanged", 0.0))
    }
    engine = {
        "num_cpus": 0,
        "drain_timeout_s": 60,
        "autoscaling": {"max_replicas": 2, "upscale_delay_s": 2.0, "downscale_delay_s": 4.0},
        "lora": {"adapters": adapters, "max_rank": 8},
    }
    return {"model": "demo", "served_model_name": SCALED, "vllm_args": ["--max-num-seqs", "8"], "engine": engine}


def _gangs() -> dict[str, Any]:
    engine = {
        "kind": "transformers",
        "replicas": 1,
        "num_cpus": 0,
        "drain_timeout_s": 5,
        "gang": {"batch_size": GANG_SIZE, "max_wait_s": GANG_WAIT_S},
    }
    # In float32 rounding moves no token from one batch to another.
    arguments = ["--max-model-len", "2048", "--dtype", "float32"]
    return {"model": "demo", "served_model_name": GANGS, "vllm_args": arguments, "engine": engine}
