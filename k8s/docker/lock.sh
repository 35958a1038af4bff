#!/bin/sh
# lock.sh UV: what the images install, resolved anew. Run it from the repository's root after `make lock`.
#
# The CPU image gets the versions that CI tests, without tools for development. torch==...+cpu must be findable: by an
# index of PyTorch's (UV_EXTRA_INDEX_URL) or a folder (UV_FIND_LINKS).
set -eu
resolve() {
    "$uv" pip compile pyproject.toml --extra predictor --extra nixl --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --no-emit-index-url --no-emit-find-links --no-annotate --no-header --quiet "$@" >/dev/null
}
uv=$1
resolve --extra cpu --override requirements/overrides.txt --constraint requirements/cpu-3.11.lock --output-file k8s/docker/cpu.lock
resolve --extra gpu --output-file k8s/docker/gpu.lock
