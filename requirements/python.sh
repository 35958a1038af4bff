#!/bin/sh
# python.sh: prints the Python that the environment is made with, $PYTHON where that is set. Fails where none fits.
for python in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        echo "$python"
        exit 0
    fi
done
exit 1
