"""The metrics of all models at one address: each sample of a model gets the label `served_model`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oaiserve.plugins.gateway.several.models import Model

LABEL = "served_model"
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OF_PROCESS = ("process_", "python_")  # beginnings of the names of metrics of this process, which all models share

# Numbers of the store. All models share it, so these are the same for each model.
_OF_STORE = ("oaiserve_stored_responses ", "oaiserve_stored_response_bytes ")  # beginnings of lines


def merged(own: str, texts: Mapping[str, str]) -> str:
    """Return one text in Prometheus' format with the front's own metrics, and those of each model. The store's, which
    all models share, come once and without a model."""
    families: dict[str, list[str]] = {}  # lines by family, because a family must be in one piece
    for name, text in (("", own), *texts.items()):
        label = f'{LABEL}="{_escaped(name)}"'
        family: list[str] = []
        for line in text.split("\n"):
            if line.startswith("#"):
                _, kind, metric, *_ = line.split(" ", 3)
                if name and metric.startswith(_OF_PROCESS):
                    family = []  # Nothing shows its samples.
                    continue
                family = families.setdefault(metric, [])
                if not any(known.startswith(f"# {kind} ") for known in family):
                    family.append(line)
            elif line.startswith(_OF_STORE):
                if family[-1].startswith("#"):
                    family.append(line)
            elif line:
                family.append(_labelled(line, label) if name else line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _labelled(line: str, label: str) -> str:
    match = _NAME.match(line)
    assert match is not None
    metric = match[0]
    rest = line[match.end() :]
    return f"{metric}{{{label},{rest[1:]}" if rest.startswith("{") else f"{metric}{{{label}}}{rest}"


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class ModelMetrics(Collector):
    """The metrics of several models, loaded or not."""

    def __init__(self, models: Collection[Model]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        labels = [LABEL]
        loaded = GaugeMetricFamily("oaiserve_model_loaded", "Whether a model of this server is loaded.", labels=labels)
        loads = CounterMetricFamily("oaiserve_model_loads", "Loads of a model.", labels=labels)
        text = "Memory of the engine process of a model that is loaded, when that was last looked at."
        memory = GaugeMetricFamily("oaiserve_model_memory_bytes", text, labels=labels)
        for model in self._models:
            loaded.add_metric([model.name], float(model.loaded is not None))
            loads.add_metric([model.name], model.num_loads)
            if model.loaded is not None:
                memory.add_metric([model.name], model.num_bytes)
        yield from (loaded, loads, memory)
