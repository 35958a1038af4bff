#!/bin/sh
# lock.sh UV: resolve pyproject.toml's extras cpu, nixl, predictor, plan and dev into a full lock for each Python.
#
# The newer Pythons get the versions of the oldest, which CI tests, wherever these have wheels for them.
# torch==...+cpu must be findable: by an index of PyTorch's (UV_EXTRA_INDEX_URL) or a folder (UV_FIND_LINKS).
set -eu
lock() {
    python=$1
    shift
    "$uv" pip compile pyproject.toml --extra cpu --extra nixl --extra predictor --extra plan --extra dev --override requirements/overrides.txt \
        --python-version "$python" --python-platform x86_64-manylinux_2_28 \
        --no-emit-index-url --no-emit-find-links --annotation-style line --no-header --quiet "$@" \
        --output-file "requirements/cpu-$python.lock" >/dev/null
}
uv=$1
lock 3.11
lock 3.12 --constraint requirements/cpu-3.11.lock
lock 3.13 --constraint requirements/cpu-3.11.lock
