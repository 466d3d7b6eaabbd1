#!/bin/sh
# Runs the check for at most ten minutes, and leaves three files in $OUT. Run it again for the sections that are left.
cd "$(dirname "$0")" || exit 1
out=${OUT:-out}
if [ ! -d packages ]; then
    "${PYTHON:-python3}" -m pip install --quiet --no-index --no-deps --target packages.new wheels/*.whl || exit 1
    mv packages.new packages
fi
if [ ! -f results/gpu_check.json ] && [ -f ../gpu_check.json ]; then
    mkdir -p results && cp ../gpu_check.json results
fi
PYTHONPATH=.:packages timeout -s INT 585 "${PYTHON:-python3}" -m tools.gpu_check --out results --resume "$@"
code=$?
mkdir -p "$out"
cp results/gpu_check.json results/gpu_check.md "$out"
tar czf "$out/logs.tar.gz" -C results .
exit $code
