#!/bin/sh
# lock.sh UV LOCK: resolve pyproject.toml's extras cpu, nixl, predictor, plan and dev into a full lock.
#
# torch==...+cpu must be findable: by an index of PyTorch's (UV_EXTRA_INDEX_URL) or a folder (UV_FIND_LINKS).
set -eu
"$1" pip compile pyproject.toml --extra cpu --extra nixl --extra predictor --extra plan --extra dev --override requirements/overrides.txt \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --no-emit-index-url --no-emit-find-links --annotation-style line --no-header --output-file "$2"
