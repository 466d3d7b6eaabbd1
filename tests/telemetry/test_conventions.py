"""What is exported has the names, types and units of OpenTelemetry's registry, and none that it has replaced.

The registry is that of the installed opentelemetry-semantic-conventions, which is generated from its files. It says of
the names for GenAI that they have moved to a registry of their own: those are valid, and only others are deprecated.
"""

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    server_attributes,
    service_attributes,
    url_attributes,
)
from opentelemetry.semconv.schemas import Schemas

from oaiserve.telemetry import names, request_series
from tests.telemetry.exported import spans_of, traced
from tests.telemetry.records import records
from tests.telemetry.reported import ATTRIBUTES

# Names of the registry's first release of its own, v0.1.0, which the package has not got yet.
NEWER = {"gen_ai.request.reasoning.level", "gen_ai.request.previous_response.id"}
MOVED = "Deprecated: Moved to the [OpenTelemetry GenAI semantic conventions repository]"
# The types of those that we send, which the package does not have: as the registry has them, with any as text.
TYPES = {
    str: "operation.name provider.name request.model response.model response.id conversation.id output.type "
    "request.reasoning.level request.previous_response.id",
    bool: "request.stream",
    int: "request.max_tokens request.seed request.choice.count embeddings.dimension.count usage.input_tokens "
    "usage.output_tokens usage.cache_read.input_tokens usage.reasoning.output_tokens request.top_k",
    float: "request.temperature request.top_p request.frequency_penalty request.presence_penalty "
    "response.time_to_first_chunk",
    tuple: "response.finish_reasons request.stop_sequences",
}
TYPE_OF = {f"gen_ai.{name}": kind for kind, found in TYPES.items() for name in found.split()}


def current(module: Any) -> set[str]:
    """Return the names in a module of the registry that are not deprecated, or have only moved."""
    described = re.findall(
        r'^[A-Z_]+: Final = \(?\s*"(.*?)"\s*\)?\n"""\n(.*?)"""', inspect.getsource(module), re.M | re.S
    )
    assert described
    return {name for name, text in described if not text.startswith("Deprecated") or text.startswith(MOVED)}


def test_every_attribute_of_the_conventions_is_in_the_registry_and_current() -> None:
    modules = (gen_ai_attributes, http_attributes, server_attributes, url_attributes, error_attributes)
    known = set().union(*map(current, modules))
    sent = {name for name in ATTRIBUTES if not name.startswith("oaiserve.")}
    assert sent - known == NEWER
    assert "gen_ai.system" not in known, "the test sees what is deprecated"
    assert {name for name in sent if name.startswith("gen_ai.")} == TYPE_OF.keys()


@given(records())
@settings(max_examples=50)
def test_attributes_have_the_types_of_the_registry_and_values_of_its_enumerations(record: Any) -> None:
    operations = {str(one.value) for one in gen_ai_attributes.GenAiOperationNameValues}
    for span in spans_of(record):
        registered = {name: value for name, value in span.attributes.items() if name.startswith("gen_ai.")}
        assert {name: type(value) for name, value in registered.items()} == {name: TYPE_OF[name] for name in registered}
        assert registered.get("gen_ai.output.type", "text") in {
            one.value for one in gen_ai_attributes.GenAiOutputTypeValues
        }
        assert registered.get("gen_ai.operation.name", "chat") in operations


def test_numbers_have_the_types_of_the_registry_where_a_client_sent_integers(make_record) -> None:
    sent = dict.fromkeys(("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"), 1)
    span = spans_of(make_record(params=sent | {"seed": 7, "n": 2, "max_tokens": 3}))[1]
    types = {name: type(value) for name, value in span.attributes.items() if name.startswith("gen_ai.request.")}
    assert types == {name: TYPE_OF[name] for name in types}
    assert len(types) == 10


def test_an_operation_has_a_name_of_the_registry_if_that_knows_it() -> None:
    """Scores, ranks and speech are not in it: it lets a system have names of its own."""
    known = {str(one.value) for one in gen_ai_attributes.GenAiOperationNameValues}
    shown = {names.GEN_AI_OPERATIONS.get(operation, operation) for operation in request_series.OPERATIONS}
    assert shown - known == {"score", "rerank", "transcription", "translation"}


def test_the_metrics_of_a_server_have_name_unit_and_instrument_of_the_registry() -> None:
    in_registry: dict[str, str] = {}

    def histogram(name: str, description: str, unit: str) -> None:
        in_registry[name] = unit

    meter: Any = SimpleNamespace(create_histogram=histogram)
    for name, create in inspect.getmembers(gen_ai_metrics, inspect.isfunction):
        if name.startswith("create_gen_ai_server_"):
            create(meter)
    assert in_registry.keys() <= current(gen_ai_metrics)
    units = {"s": "seconds"}
    assert {(metric.name, metric.type, metric.unit) for metric in names.GEN_AI_METRICS} == {
        (f"{name.replace('.', '_')}_{units[unit]}", "histogram", units[unit]) for name, unit in in_registry.items()
    }
    labels = {label for metric in names.GEN_AI_METRICS for label in metric.labels}
    known = current(gen_ai_attributes) | current(error_attributes)
    assert labels <= {name.replace(".", "_") for name in known}


def test_exported_spans_name_the_schemas_of_their_names(make_record) -> None:
    (resource,) = encode_spans(traced(make_record())).resource_spans
    (scope,) = resource.scope_spans
    newest = max(Schemas, key=lambda schema: [int(number) for number in re.findall(r"\d+", schema.value)])
    assert resource.schema_url == newest.value == names.RESOURCE_SCHEMA
    assert scope.schema_url == names.GEN_AI_SCHEMA
    assert re.fullmatch(r"https://opentelemetry\.io/schemas/gen-ai-dev/\d+\.\d+\.\d+-dev", scope.schema_url)
    assert {"service.name", "service.version"} <= current(service_attributes)


def test_a_span_names_the_model_that_was_requested_and_the_one_that_answered(make_record) -> None:
    def models(**changes: Any) -> tuple[Any, ...]:
        span = spans_of(make_record(**changes))[1]
        return span.name, *(span.attributes.get(f"gen_ai.{part}.model") for part in ("request", "response"))

    assert models() == ("chat demo", "demo", "demo")
    assert models(requested_model="gpt-4o") == ("chat gpt-4o", "gpt-4o", "demo")
    assert models(requested_model="nope", http_status=404) == ("chat nope", "nope", None)


@pytest.mark.parametrize("asked", ["responses", "messages"])
def test_an_operation_that_the_registry_does_not_know_is_a_chat_in_all_that_has_its_names(
    asked: str, make_record
) -> None:
    span = spans_of(make_record(operation=asked))[1]
    assert (span.name, span.attributes["gen_ai.operation.name"]) == ("chat demo", "chat")
