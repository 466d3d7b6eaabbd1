"""The sampling parameters that apply where a request leaves them out, on all routes, and where they are shown."""

from pathlib import Path
from typing import Any

import pytest

from oaiserve.app import _kind, create_app
from oaiserve.checkpoints.recommended_sampling import ROWS
from oaiserve.config import Config, EngineOptions, OptionError, ServerOptions
from oaiserve.routes.intake.body_types import SamplingBody
from oaiserve.routes.intake.sampling_defaults import given_defaults, sampling_defaults
from oaiserve.routes.sampling_defaults import FALLBACK, NEUTRAL, SamplingDefaults
from tests.routes.doubles import FakeEngine, FakeTelemetry
from tests.serving import Serve, Served
from tests.world.serving import Place

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def defaults(of_model: dict[str, Any], given: str | None = None, *, reads_config: bool = True) -> SamplingDefaults:
    config = Config("m", ServerOptions(default_params=given), EngineOptions(generation_config=reads_config))
    return sampling_defaults(config, of_model)


@pytest.mark.parametrize(
    ("of_model", "given", "body", "expected"),
    [
        ({}, None, {}, FALLBACK),
        ({}, None, {"seed": 1, "n": 2, "presence_penalty": 1}, FALLBACK),
        ({}, None, {"temperature": 1}, {}),  # OpenAI's distribution
        ({}, None, {"top_p": 0.9}, {}),
        ({}, None, {"min_p": 0}, {}),
        ({"repetition_penalty": 1.1}, None, {}, {**FALLBACK, "repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.1}, None, {"temperature": 1}, {"repetition_penalty": 1.1}),
        ({"top_p": 0.95, "top_k": 64}, None, {}, {"top_p": 0.95, "top_k": 64}),  # Gemma's: a temperature of 1
        (QWEN, None, {}, QWEN),
        (QWEN, None, {"temperature": 1}, QWEN),  # as in vLLM
        (QWEN, "temperature=0.2,min_p=0.1", {}, QWEN | {"temperature": 0.2, "min_p": 0.1}),
        ({}, "temperature=0.2", {}, {"temperature": 0.2}),
        ({}, "temperature=1", {}, {}),  # turns the fallback off
        ({}, "presence_penalty=0.5", {}, {**FALLBACK, "presence_penalty": 0.5}),
        ({"max_length": 9, "max_new_tokens": 8}, None, {}, FALLBACK),  # limits are no sampling parameters
    ],
)
def test_fallback_applies_only_if_no_sampling_parameter_is_set(
    of_model: dict[str, Any], given: str | None, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert defaults(of_model, given).of_request(SamplingBody(**body)) == NEUTRAL | expected


def test_without_generation_config_the_defaults_are_openais_and_the_operators() -> None:
    assert defaults({}, reads_config=False).of_request() == NEUTRAL
    assert defaults({}, "top_k=5", reads_config=False).of_request() == NEUTRAL | {"top_k": 5}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (5, "must be <= 2, got 5.0"),
        (float("nan"), "must be >= 0, got nan"),
        ("hot", "must be a number, got a string"),
        (True, "must be a number, got a boolean"),
        ([1], "must be a number, got a list"),
    ],
)
def test_wrong_default_in_model_files_is_ignored_with_the_error_of_a_request(value: object, problem: str) -> None:
    defaults_left = defaults({"temperature": value, "top_k": 5})
    assert defaults_left.of_request() == NEUTRAL | {"top_k": 5}
    assert defaults_left.ignored == (f"Invalid 'temperature': {problem}.",)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (None, {}),
        ("temperature=0.7,top_p=0.8", {"temperature": 0.7, "top_p": 0.8}),
        (" top_k = 20 , frequency_penalty = -1 ", {"top_k": 20, "frequency_penalty": -1}),
        ('{"temperature": 0, "top_k": -1, "min_p": null}', {"temperature": 0, "top_k": 0}),
    ],
)
def test_default_params_are_pairs_or_json(text: str | None, values: dict[str, Any]) -> None:
    assert given_defaults(text) == values


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("temperature=5", "is wrong. Invalid 'temperature': must be <= 2, got 5.0."),
        ('{"temperature": 5}', "is wrong. Invalid 'temperature': must be <= 2, got 5.0."),
        ("temperature=hot", "is wrong. Invalid 'temperature': must be a number, got a string."),
        ("temperature", "is wrong. Invalid 'temperature': must be a number, got a string."),
        ("top_k=2.5", "is wrong. Invalid 'top_k': must be an integer, got 2.5."),
        ("temprature=1", "is wrong. Invalid 'temprature': is not a sampling parameter. There are temperature, "),
        ("n=2", "is wrong. Invalid 'n': is not a sampling parameter."),
        (
            '{"max_new_tokens": 9}',
            "is wrong. Invalid 'max_new_tokens': is not a sampling parameter. --default-max-tokens ",
        ),
        ("{temperature: 1}", "is '{temperature: 1}', which is not JSON: "),
    ],
)
def test_wrong_default_params_get_the_errors_of_requests(text: str, problem: str) -> None:
    with pytest.raises(OptionError) as refused:
        given_defaults(text)
    assert str(refused.value).startswith(f"--default-params {problem}")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"model": "org/demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    ],
)
def test_all_generation_routes_have_the_same_defaults(serve: Serve, path: str, body: dict[str, Any]) -> None:
    served = serve(default_params="temperature=0.25,top_k=7")
    for more, temperature in ({}, 0.25), ({"temperature": 0}, 0), ({"temperature": 1}, 1):
        assert served.post(path, **body, **more).status_code == 200
        params = served.engine.submitted.get().params
        assert (params.temperature, params.top_k, params.min_p) == (temperature, 7, 0)
        applied = served.telemetry.records.get().sampling
        assert applied == NEUTRAL | {"temperature": temperature, "top_k": 7}


def test_models_show_their_default_sampling(served: Served, serve: Serve) -> None:
    def shown(one: Served) -> dict[str, Any]:
        return one.http.get("/v1/models").json()["data"][0]["default_sampling"]  # type: ignore[no-any-return]

    assert shown(served) == NEUTRAL
    assert shown(serve(default_params="temperature=0.25,top_k=7")) == NEUTRAL | {"temperature": 0.25, "top_k": 7}


def test_recommended_values_apply_and_are_named_with_their_source() -> None:
    (row,) = (row for row in ROWS if row.publisher == "Mistral AI")
    config = Config("m")
    recommended = sampling_defaults(config, row.values, row)
    assert recommended.of_request() == NEUTRAL | {"temperature": 0.15}
    assert str(recommended) == "temperature 0.15 (recommended by Mistral AI)"
    changed = sampling_defaults(Config("m", ServerOptions(default_params="temperature=0.3")), row.values, row)
    assert changed.of_request() == NEUTRAL | {"temperature": 0.3}
    assert str(changed) == "temperature 0.3 (--default-params and recommended by Mistral AI)"


def test_models_show_where_their_default_sampling_is_recommended(served: Served, place: Place) -> None:
    assert "default_sampling_source" not in served.http.get("/v1/models").json()["data"][0]
    engine = FakeEngine(runtime=place.world)
    engine.recommendation = ROWS[0]
    engine.default_params = dict(ROWS[0].values)
    app = create_app(Config("org/demo"), engine, FakeTelemetry(place.world), runtime=place.world)
    with place.running(app) as url, place.client_of(url) as http:
        (model,) = http.get("/v1/models").json()["data"]
    assert model["default_sampling"] == NEUTRAL | ROWS[0].values
    assert model["default_sampling_source"] == ROWS[0].source


def test_models_show_how_long_answers_may_be_by_default(served: Served) -> None:
    def shown() -> dict[str, Any]:
        return served.http.get("/v1/models").json()["data"][0]  # type: ignore[no-any-return]

    assert "default_max_tokens" not in shown()
    served.engine.default_params = {"max_new_tokens": 512}
    assert shown()["default_max_tokens"] == 512


def test_servers_with_other_defaults_write_other_bytes(tmp_path: Path) -> None:
    def kind(given: str | None) -> str:
        config = Config(str(tmp_path), ServerOptions(default_params=given), EngineOptions(device="cpu"))
        return _kind(config, sampling_defaults(config, {}))

    assert kind("temperature=0.7,min_p=0.05") == kind(None) != kind("temperature=0.7")


def test_servers_that_read_images_with_another_file_write_other_bytes(tmp_path: Path) -> None:
    for name in ("model.gguf", "mmproj.gguf", "other.gguf"):
        (tmp_path / name).write_text(name)

    def kind(**options: Any) -> str:
        config = Config(str(tmp_path / "model.gguf"), engine=EngineOptions(device="cpu", **options))
        return _kind(config, sampling_defaults(config, {}))

    assert kind(mmproj=tmp_path / "mmproj.gguf") == kind() != kind(mmproj=tmp_path / "other.gguf")
