"""Downloads the models of an application into the hub's cache (HF_HOME), as far as they are not there.

SLUICE_APP holds the application's configuration. Folders, and the model that comes with Sluice, need no download.
"""

import json
import os
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

# Beside safetensors, hubs keep the same weights in forms that vLLM does not read then.
OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "original/*"]


def option(args, name):
    """What follows NAME among vLLM's arguments, or stands behind its equals sign."""
    for argument, following in zip(args, [*args[1:], None], strict=False):
        if argument == name:
            return following
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


app = json.loads(os.environ["SLUICE_APP"])
for settings in [app, *app.get("more_models", [])]:
    model, args = settings["model"], settings.get("vllm_args", [])
    if model == "demo" or Path(model).is_dir():
        print(f"{model}: nothing to download")
        continue
    revision = option(args, "--revision")
    files = HfApi().list_repo_files(model, revision=revision)
    others = OTHER_WEIGHTS if any(file.endswith(".safetensors") for file in files) else None
    where = snapshot_download(
        model, revision=revision, ignore_patterns=others, cache_dir=option(args, "--download-dir")
    )
    print(f"{model}: in {where}")
