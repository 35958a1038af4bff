#!/bin/sh
# What Ray Serve runs as its HAProxy: the script that comes with Sluice, wherever the image has it.
package=$(python -c 'from importlib.util import find_spec; print(find_spec("deployments").submodule_search_locations[0])')
exec sh "$package/process/haproxy.sh" "$@"
