"""A model so large that computing outweighs serving; nothing to download: `python -m bench.random_model --help`."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.model_kinds import DEMO_MODEL, TOKENIZER_FILES, vocabulary, write_images, write_windows
from bench.servers import vllm_is_for_gpus

VOCABULARY = 8192
CALIBRATED = ("--load-format=dummy", "--skip-tokenizer-init", "--max-model-len=8192")
MODES = (
    """SLUICE_BENCH_ARGS='{"load_format": "dummy", "max_model_len": 8192}' SLUICE_BENCH_CLOCK=wall """
    "SLUICE_BENCH_SCALE=2 pytest bench/deployments/test_modes_on_this_machine.py -s"
)
# Qwen3's published sizes.
QWEN3 = {
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "eos_token_id": 151645,
}  # fmt: skip
SIZES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
WINDOW = 256
KINDS: Mapping[str, Callable[[Path], None]] = {
    "windows": lambda folder: write_windows(folder, WINDOW),
    "images": write_images,
}
EPILOG = """\
examples, which print commands to go on with:
  python -m bench.random_model /tmp/random              small, with the demo model's tokenizer
  python -m bench.random_model /tmp/windows --kind windows   as small, a Gemma 3 with sliding windows
  python -m bench.random_model /tmp/8b --size 8b        as large as Qwen3-8B and without a tokenizer, for a GPU
"""


def write_config(folder: Path, **changes: object) -> None:
    """Write a Qwen3 with 8 layers of width 512: 25 million parameters and 512 for each token of the vocabulary.

    `changes` are other values than those, by their names in config.json.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rope_theta": 10000.0, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))


def write_model(folder: Path) -> None:
    """That, with the demo model's vocabulary and tokenizer.

    Raises:
        FileExistsError: the folder is there already.
    """
    folder.mkdir(parents=True)
    write_config(folder, vocab_size=vocabulary())
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, folder)


def write_qwen3(folder: Path, size: str) -> None:
    """Only the configuration of a Qwen3 of that size. Raises FileExistsError: the folder is there already."""
    folder.mkdir(parents=True)
    write_config(folder, **QWEN3, tie_word_embeddings=size != "8b", **SIZES[size])


def engine_arguments() -> tuple[str, ...]:
    """For engines of such a model. By itself vLLM takes bfloat16, for which many processors have no instructions."""
    return "--load-format=dummy", f"--dtype={'auto' if vllm_is_for_gpus() else 'float32'}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.random_model",
        description="Writes a model without weights, mostly a Qwen3: vLLM makes them at random.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--size", choices=SIZES, help="of a published Qwen3 (default: 27 million parameters)")
    what.add_argument("--kind", choices=KINDS, help="a Gemma 3 with sliding windows, or a BLIP-2, which takes images")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    try:
        if options.kind is not None:
            folder.mkdir(parents=True)
            KINDS[options.kind](folder)
            print(f"python -m bench.goodput --model {folder} -- {' '.join(engine_arguments())}")
        elif options.size is None:
            write_model(folder)
            print(f"python -m bench.compare --model {folder} -- {' '.join(engine_arguments())}")
        else:
            write_qwen3(folder, options.size)
            print(f"sluice calibrate --model {folder} --gpu -o {folder}.csv -- {' '.join(CALIBRATED)}")
            print(f"SLUICE_BENCH_MODEL={folder} {MODES}")
    except OSError as error:
        print(f"bench.random_model: {folder}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
