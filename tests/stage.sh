#!/bin/sh
# Says what a stage of `make test` does and how long it took on this machine the last time, and runs it.
#
#     sh tests/stage.sh NAME WHAT COMMAND [ARGUMENT ...]
set -eu
name=$1 what=$2
shift 2
folder=.pytest_cache/stages
mkdir -p "$folder"
if [ -f "$folder/$name" ]; then
    last="$(cat "$folder/$name") min the last time"
else
    last="the first time here"
fi
echo "== $name: $what ($last; it is $(date +%H:%M))"
begun=$(date +%s)
"$@"
echo $((($(date +%s) - begun + 59) / 60)) > "$folder/$name"
