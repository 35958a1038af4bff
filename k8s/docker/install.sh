#!/bin/sh
# install.sh SOURCE LOCK PREFIX: Sluice from SOURCE as a wheel into a virtual environment at PREFIX, with what LOCK names.
#
# Without dependency resolution, as in requirements/install.sh, and with nothing left that installs or builds.
# LOCK_INDEX is one more index for what LOCK names. packages.txt lists what is in the image, as the metadata beside each
# package does.
set -eu
source=$1
lock=$2
prefix=$3
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

python -m venv "$build/tools"
"$build/tools/bin/pip" --quiet install --no-cache-dir hatchling==1.33.0
"$build/tools/bin/pip" --quiet wheel --no-deps --no-build-isolation --wheel-dir "$build" "$source"

python -m venv "$prefix"
"$prefix/bin/pip" --quiet install --no-cache-dir --no-deps ${LOCK_INDEX:+--extra-index-url "$LOCK_INDEX"} --requirement "$lock"
"$prefix/bin/pip" --quiet install --no-cache-dir --no-deps "$build"/sluice_serve-*.whl
"$prefix/bin/pip" freeze --all >"$prefix/packages.txt"
"$prefix/bin/pip" --quiet uninstall --yes pip
find "$prefix" -name __pycache__ -type d -prune -exec rm -rf {} +
