#!/bin/sh
# Says what a stage of `make test` does and how long it took on this machine the last time, and runs it. How long it
# takes and how many CPU seconds are written down, whatever comes of it: of the whole machine, for what Ray starts ends
# as nobody's child.
#
#     sh tests/stage.sh NAME WHAT COMMAND [ARGUMENT ...]
#     sh tests/stage.sh --table      all that have run here, in the order of their last runs
set -eu
folder=.pytest_cache/stages

cpu_s() {
    awk -v a_second="$(getconf CLK_TCK)" '/^cpu / { printf "%d", ($2 + $3 + $4) / a_second; exit }' /proc/stat
}

if [ "$1" = --table ]; then
    printf '%-16s %8s %12s  %s\n' stage minutes "CPU seconds" result
    for file in $(ls -tr "$folder" 2>/dev/null); do
        printf '%-16s %8s %12s  %s\n' "$file" $(cat "$folder/$file")
    done
    exit
fi

name=$1 what=$2
shift 2
mkdir -p "$folder"
if [ -f "$folder/$name" ]; then
    last="$(cut -d' ' -f1 "$folder/$name") min the last time"
else
    last="the first time here"
fi
echo "== $name: $what ($last; it is $(date +%H:%M))"
began=$(date +%s) used=$(cpu_s) result=failed
written() {
    minutes=$(awk -v s=$(($(date +%s) - began)) 'BEGIN { printf "%.1f", s / 60 }')
    echo "$minutes $(($(cpu_s) - used)) $result" > "$folder/$name"
}
trap written EXIT
"$@"
result=passed
