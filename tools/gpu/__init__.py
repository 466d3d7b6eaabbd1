"""The check of a GPU. Three of its files are commands; the others are their parts, and those of `tools.gpu_check`.

python -m tools.gpu_check answers|figures --out DIR
    Two calls of 270 s on a GPU: whether answers are right, and how fast it is. sections.py lists their sections. On a
    borrowed one, all with `--resume`: `answers`, then `figures --only environment quantized`, then `figures`.
python -m tools.gpu_check --dry-run
    Both calls on a fake GPU, for which it compiles all kernels. Run it before a call on a real one.
python -m tools.gpu.kernels
    Compiles every kernel for five kinds of cards: after a change of a kernel, or for a new Triton.
python -m tools.gpu.pack, then sh tools/gpu/check.sh answers|figures
    Packs what the check needs on a machine without a network, and runs it there.

The parts:

- The check: run.py starts each section in a process of its own (section.py). They take turns at the device (turns.py).
  summary.py and tables.py write the text.
- Figures: environment, steps (with profiles, reference and timing), gpt2, quantized, streams, offload and
  kernel_times. Where a part of a section fails, parts.py lets the others go on.
- Answers: probes, answers, and schedule with its requests. Cases run side by side in processes (side_by_side.py,
  worker.py), and ties.py tells rounding from a fault.
- Models: models.py describes them with random weights, workload.py starts engines of them, and doubles.py starts them
  on a CPU.
- The dry run: dry_run.py on fake_device.py. launches.py notes which kernels are launched, and compiling.py compiles
  them.
- Kernels: shapes.py has the launches of the table, and resources.py compiles them with one version of Triton.
"""
