#!/bin/sh
# Runs a call of the GPU check for at most 265 seconds, on a machine without a network, from the sources and from what
# `python -m tools.gpu.pack` has packed:
#
#     sh tools/gpu/check.sh figures
#
# $OUT gets the results as they come, and at the end a log of each section.
began=$(date +%s)
cd "$(dirname "$0")/../.." || exit 1
out=${OUT:-out}
pack=${PACK:-.pack}
there=${THERE:-/tmp/oaiserve-gpu}
python=${PYTHON:-python3}
mkdir -p "$out" "$there/results"

if [ ! -d "$there/packages" ]; then
    tar xzf "$pack/packages.tar.gz" -C "$there" &
    if [ -f "$pack/kernels.tar.gz" ]; then
        tar xzf "$pack/kernels.tar.gz" -C "$there" &&
            sed -i "s#@KERNELS@#$there/kernels#g" "$there"/kernels/*/__grp__*
    fi
    wait
fi
mkdir -p "$there/kernels"
cp "$pack/COMMIT" . 2>/dev/null
packed=$(ls "$there/kernels" | wc -l)

# The packed kernels were compiled with the assembler that is part of Triton. Their keys name it.
triton=$("$python" -c 'import importlib.util as u; print(*u.find_spec("triton").submodule_search_locations)')
[ -x "$triton/backends/nvidia/bin/ptxas" ] && unset TRITON_PTXAS_PATH
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD:$there/packages${PYTHONPATH:+:$PYTHONPATH}" TRITON_CACHE_DIR="$there/kernels"
budget=$((254 + began - $(date +%s)))
echo "unpacked after $(($(date +%s) - began)) s: $packed compiled kernels; $budget s are left for sections"
timeout -s INT -k 3 $((budget + 8)) "$python" -m tools.gpu_check --out "$there/results" --resume \
    --budget-seconds "$budget" "$@" &
check=$!
while kill -0 $check 2>/dev/null; do
    sleep 1
    cp "$there"/results/gpu_check.* "$out" 2>/dev/null
done
wait $check
code=$?
cp "$there"/results/gpu_check.* "$out"
tar czf "$out/logs.tar.gz" -C "$there/results" .
echo "$(ls "$there/kernels" | wc -l) compiled kernels, of which $packed were packed; $(($(date +%s) - began)) s in all"
exit $code
