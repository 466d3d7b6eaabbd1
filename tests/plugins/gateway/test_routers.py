"""Replicas with different models: each request goes to one that has its model, and few routers serve many models."""

from array import array
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.plugins.gateway import routers
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.wire.prefix_keys import prompt_of
from oaiserve.wire.report import MOST_MODELS, ReplicaReport
from oaiserve.wire.router import NoReplica

Served = dict[str, list[str]]


def reporting(served: Served, aliases: Served | None = None) -> Routers:
    made = Routers()
    made.update_replicas(served, 0)
    for number, (name, models) in enumerate(served.items()):
        also = tuple((aliases or {}).get(name, ()))
        made.learn(ReplicaReport(name, "1", number, 0, 0, array("Q"), models=tuple(models), aliases=also), 0)
    return made


def chosen_in_turn(made: Routers, model: str) -> set[str]:
    """Return the replicas that a request is sent to, each of which refuses it."""
    found: list[str] = []
    prompt = prompt_of({"prompt": "Hello", "model": model})
    with suppress(NoReplica):
        while True:
            found.append(made.choose(prompt, 0, without=found).replica)
    return set(found)


@pytest.mark.parametrize("most_routers", [routers.MOST_ROUTERS, 2, 0])
@given(served=st.dictionaries(st.sampled_from("abcd"), st.lists(st.sampled_from("xyz"), unique=True), min_size=1))
def test_a_request_goes_to_all_that_have_its_model_and_to_no_others(most_routers: int, served: Served) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routers, "MOST_ROUTERS", most_routers)
        made = reporting(served)
        known = {model for models in served.values() for model in models}
        for model in known:
            having = {name for name, models in served.items() if model in models or not models}
            assert chosen_in_turn(made, model) == having
        unknown = chosen_in_turn(made, "none")
    assert unknown == set(served)


def test_a_path_leads_to_the_replicas_that_serve_it_and_is_not_listed() -> None:
    served = {"a": ["small"], "b": ["small"], "c": ["large"]}
    aliases = {"a": ["/here/small.gguf"], "b": ["/there/small.gguf"], "c": ["large.gguf"]}
    made = reporting(served, aliases)
    assert chosen_in_turn(made, "small") == {"a", "b"}
    assert chosen_in_turn(made, "/here/small.gguf") == {"a"}
    assert chosen_in_turn(made, "/there/small.gguf") == {"b"}
    assert chosen_in_turn(made, "large") == chosen_in_turn(made, "large.gguf") == {"c"}
    assert [made.models_of(name) for name in "abc"] == [("small",), ("small",), ("large",)]


def test_paths_of_one_model_on_each_replica_lead_there() -> None:
    made = reporting({"a": ["m"], "b": ["m"]}, {"a": ["/here/m"], "b": ["/there/m"]})
    assert [chosen_in_turn(made, name) for name in ("m", "/here/m", "/there/m")] == [{"a", "b"}, {"a"}, {"b"}]


def test_models_of_the_same_replicas_share_a_router() -> None:
    shared = [f"shared {number}" for number in range(MOST_MODELS // 2)]
    served = {name: [*shared, *(f"{name} {number}" for number in range(MOST_MODELS // 2))] for name in "abc"}
    made = reporting(served)
    assert len(made.routers) == 1 + 4
    before = made.by_model["a 7"]
    served["d"] = ["d"]
    made.update_replicas(served, 1)
    made.learn(ReplicaReport("d", "1", 0, 0, 0, array("Q"), models=("d",)), 1)
    assert made.by_model["a 7"] is before, "it keeps what it knows"
