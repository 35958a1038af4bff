#!/bin/sh
# system.sh serve|test|test-fresh: what this target of make needs of the system, beside git and make.
#
# Root on Debian or Ubuntu: what is missing is installed. Anybody else is told the one line that does it. In a terminal
# this then goes on by itself once that is done; without one it fails, and the same command again goes on.
set -eu
what=$1
wait_s=1800

has() {
    for command; do
        command -v "$command" >/dev/null && return
    done
    return 1
}

# Names of Debian's packages. Python comes first: without it the others cannot be looked for.
missing() {
    if ! has ${PYTHON:-python3 python3.11 python3.12 python3.13}; then
        echo python3-venv libnuma1
    elif python=$(sh requirements/python.sh); then
        "$python" -c 'import ensurepip, venv' 2>/dev/null || "$python" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])'
        "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || echo libnuma1 # vLLM's build for CPUs
    fi
    [ "$what" != serve ] || return 0
    "${python:-none}" -c 'import ctypes; ctypes.CDLL("libatomic.so.1")' 2>/dev/null || echo libatomic1 # the Node in Playwright's wheel (1.65)
    has chromium chromium-browser google-chrome || echo "$chromium" # the page
    has ip /usr/sbin/ip || echo iproute2                            # networks that fail
    has npm || echo npm                                             # Helm 3, for the chart
    [ "$what" != test-fresh ] || has debootstrap || echo debootstrap  # new machines
}

# Ubuntu's own is a package of another name, which installs a snap.
chromium=chromium
! grep -qs '^ID=ubuntu' /etc/os-release || chromium=chromium-browser

packages=$(missing | xargs)
[ -n "$packages" ] || exit 0

if ! has apt-get; then
    echo "make $what needs what Debian calls $packages: install that, and run it again." >&2
    exit 1
fi
install="apt-get install -y --no-install-recommends $packages"
if [ "$(id -u)" = 0 ]; then
    echo "installing what is missing here: $install"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    # Lists that cannot all be updated may still do.
    if ! { apt-get update || true; $install; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "apt-get could not install what make $what needs. All it said is in $log." >&2
        exit 1
    fi
    rm "$log"
    exit 0
fi

echo "make $what needs packages that are not installed here. In another terminal:" >&2
printf '\n    sudo %s\n\n' "$install" >&2
[ -t 0 ] || { echo "Then run it again." >&2; exit 1; }
echo "It goes on by itself when they are there; Ctrl-C ends it." >&2
end=$(($(date +%s) + wait_s))
while [ -n "$(missing)" ]; do
    [ "$(date +%s)" -lt "$end" ] || { echo "they are not there after half an hour" >&2; exit 1; }
    sleep 2
done
