"""Where the replicas of a machine run: each on a GPU of its own, or on a part of the cores. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from oaiserve.config import Bytes, Device, EngineOptions, Replicas, ServerOptions
from oaiserve.errors import StartupError
from oaiserve.system_cpus import allowed_cpus, default_threads

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_HIDDEN = ("", "-1", "NoDevFiles")  # values of the variable with which CUDA finds no GPU


class Placement(NamedTuple):
    """Where one replica runs. Without values, it runs wherever this process may."""

    gpu: str = ""  # as VISIBLE_GPUS names it
    cpus: tuple[int, ...] = ()  # the cores of its NUMA nodes


def apart(
    server: ServerOptions, device: Device, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> list[Placement]:
    """Return the placements of the engine processes, or none if the engine runs in the server's process. Raises
    StartupError."""
    is_apart = server.engine_process == "on" or server.front_processes > 1
    if server.engine_process == "auto" and not is_apart:
        is_apart = device == "cuda" or (device == "auto" and bool(_gpus(environ, root)))
    if server.replicas == 1 and not is_apart:
        return []
    places = placements(server.replicas, device, environ, root)
    return places if len(places) > 1 or is_apart else []


def placements(
    replicas: Replicas, device: Device, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> list[Placement]:
    """Return the placements of all replicas: "auto" is one for each GPU, or else for each NUMA node. Raises
    StartupError for more replicas than GPUs. `root` is the folder that contains dev/ and sys/."""
    gpus = [] if device == "cpu" else _gpus(environ, root)
    nodes = [] if gpus else _numa_nodes(root)
    number = max(1, len(gpus or nodes)) if replicas == "auto" else replicas
    if number == 1:
        return [Placement()]
    if gpus:
        if number > len(gpus):
            raise StartupError(
                f"--replicas is {number}, but there are {len(gpus)} GPUs, and each replica needs one of its own. Use "
                f"--replicas auto, or --device cpu."
            )
        return [Placement(gpu=gpu) for gpu in gpus[:number]]
    if len(nodes) < 2:
        return [Placement()] * number
    places = []
    for index in range(number):
        first = index * len(nodes) // number
        last = max(first + 1, (index + 1) * len(nodes) // number)
        places.append(Placement(cpus=tuple(sorted(cpu for node in nodes[first:last] for cpu in node))))
    return places


def options_of(options: EngineOptions, places: list[Placement], index: int) -> EngineOptions:
    """Return the settings of one replica: on a CPU, its share of the threads, memory and disk."""
    if len(places) == 1 or places[index].gpu:
        return options
    number = len(places)
    folder = options.prefix_cache_dir
    return replace(
        options,
        cpu_threads=max(1, (options.cpu_threads or default_threads()) // number),
        num_sharing=number,
        prefix_cache_dir=None if folder is None else folder / f"replica-{index}",
        prefix_cache_disk=Bytes(options.prefix_cache_disk // number),
    )


def _gpus(environ: Mapping[str, str], root: Path) -> list[str]:
    """Return the names of the GPUs that this process may use."""
    if (named := environ.get(VISIBLE_GPUS)) is not None:
        return [] if named in _HIDDEN else [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate((root / "dev").glob("nvidia[0-9]*"))]


def _numa_nodes(root: Path) -> list[set[int]]:
    """Return the CPUs of each NUMA node on which this process may run."""
    allowed = {*allowed_cpus()}
    lists = sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    nodes = [_cpus_in(path.read_text()) & allowed for path in lists]
    return [node for node in nodes if node]


def _cpus_in(text: str) -> set[int]:
    """Return the CPUs in a list in the kernel's format, such as 0-3,8."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
