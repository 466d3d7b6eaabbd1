"""Dry runs of the sections of the GPU check: the same code with tiny models on a CPU."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.start.features import FEATURES
from tools import gpu_check
from tools.gpu import probes
from tools.gpu.sections import NOT_ON_CPU, Target

# Rows without numbers are computed like the others, and then marked.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")]

DEVICE = torch.device("cpu")
CPU = Target(DEVICE, quick=True)


def found_by(parts: Any) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def test_the_check_runs_one_section_writes_its_results_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = gpu_check.main(["--out", str(tmp_path), "--device", "cpu", "--quick", "--only", "environment"])
    assert code == 0
    result = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]["environment"]
    assert (result["status"], result["ceilings"]) == ("done", NOT_ON_CPU)
    assert result["versions"]["torch"] == version("torch")
    assert (tmp_path / "gpu_check.md").read_text() == capsys.readouterr().out.removesuffix("\n")
    assert (tmp_path / "environment.log").exists()
    again = ["--out", str(tmp_path), "--device", "cpu", "--quick", "--only", "environment", "--resume"]
    monkeypatch.setattr(gpu_check, "run_all", lambda chosen, *_: pytest.fail(chosen) if chosen else iter(()))
    assert gpu_check.main(again) == 0
    assert "environment done" in capsys.readouterr().out


# Runs a command as compute-sanitizer does, and reports an error if the command says so.
CHECKER = r"""#!/bin/sh
[ "$1 $2 $3" = "--tool memcheck --log-file" ] || exit 7
log=$4
shift 4
"$@" 2> "$log.said"
code=$?
cat "$log.said" >&2
if grep -q unsound "$log.said"; then
    printf 'Invalid __global__ read of size 2\nERROR SUMMARY: 1 error\n' > "$log"
else
    echo 'ERROR SUMMARY: 0 errors' > "$log"
fi
rm "$log.said"
exit $code
"""
# A probe that finds a problem with caches in eight bits, and reads where it should not with adapters.
PROBE = """
import json, pickle, sys
order = pickle.load(sys.stdin.buffer)
verdict = dict.fromkeys(FEATURES, "") | {"fp8_products": "no matrices"}
print("found: " + json.dumps({"verdict": verdict, "ways": {}, "seconds": {}, "about": ""}), file=sys.stderr)
if order.options.kv_cache_dtype == "fp8":
    sys.exit("wrong draws")
if order.options.has_adapters:
    print("unsound", file=sys.stderr)
""".replace("FEATURES", str(list(FEATURES)))


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(probes, "COMMAND", (sys.executable, "-c", PROBE))
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    return monkeypatch


def test_probes_report_the_problems_of_each_model(probed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checker = tmp_path / "compute-sanitizer"
    checker.write_text(CHECKER)
    checker.chmod(0o755)
    probed.setattr(probes, "CHECKER", str(checker))
    found = found_by(probes.memory(CPU))
    assert found["checker"] == str(checker)
    wrong = {name for name in probes.SMALL_CASES if not found[name]["equal"]}
    assert wrong == {"Llama, AWQ, cache in FP8", "Gemma 2, adapters"}
    assert found["Llama, AWQ, cache in FP8"]["problems"]["kernels"].endswith("exit code 1: wrong draws")
    assert "Invalid __global__ read of size 2" in found["Gemma 2, adapters"]["errors"]


def test_without_a_checker_probes_run_as_they_are(probed: pytest.MonkeyPatch) -> None:
    probed.setattr(probes, "CHECKER", "/no/such/program")
    probed.setattr(probes, "SMALL_CASES", {"Llama": probes.Case("llama")})
    found = found_by(probes.memory(CPU))
    assert found["checker"] == "compute-sanitizer is not installed"
    assert found["Llama"]["equal"]
