"""The metrics of several processes as one text, read by Prometheus' own parser."""

from prometheus_client.parser import text_string_to_metric_families

from oaiserve.plugins.gateway.several.metrics import merged

OWN = "# HELP gateway_total Requests.\n# TYPE gateway_total counter\ngateway_total 3.0\n"
TEXT = """# HELP ttft_seconds Time {to} "first" token.
# TYPE ttft_seconds histogram
ttft_seconds_bucket{le="+Inf",model="m{}"} 2
ttft_seconds_count{model="m{}"} 2
ttft_seconds_sum{model="m{}"} 0.5
# HELP running Sequences.
# TYPE running gauge
running 1.0
"""


def test_samples_get_the_name_of_their_model_and_families_stay_in_one_piece() -> None:
    text = merged(OWN, {"a": TEXT, 'b"\\': TEXT})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    labels = [sample.labels for sample in families["running"].samples]
    assert labels == [{"served_model": "a"}, {"served_model": 'b"\\'}]
    assert len(families["ttft_seconds"].samples) == 6
    assert families["ttft_seconds"].type == "histogram"
    assert families["ttft_seconds"].samples[0].labels == {"served_model": "a", "le": "+Inf", "model": "m{}"}
    assert families["gateway"].samples[0].labels == {}
    assert text.count("# TYPE ttft_seconds ") == 1


STORE = """# HELP oaiserve_stored_responses Stored.
# TYPE oaiserve_stored_responses gauge
oaiserve_stored_responses 4.0
# HELP oaiserve_stored_responses_dropped_total Dropped.
# TYPE oaiserve_stored_responses_dropped_total counter
oaiserve_stored_responses_dropped_total{reason="age"} 1
"""


def test_what_all_models_share_in_the_store_is_counted_once() -> None:
    families = {family.name: family for family in text_string_to_metric_families(merged(OWN, {"a": STORE, "b": STORE}))}
    (stored,) = families["oaiserve_stored_responses"].samples
    assert (stored.labels, stored.value) == ({}, 4)
    dropped = families["oaiserve_stored_responses_dropped"].samples
    assert [sample.labels["served_model"] for sample in dropped] == ["a", "b"]
