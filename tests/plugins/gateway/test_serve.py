"""What a gateway prints when it is ready."""

from oaiserve.config import Config
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.plugins.gateway.serve import banner_of_gateway
from oaiserve.plugins.gateway.several.serve import banner_of_models


def test_banners_of_several_models_and_gateways_list_them() -> None:
    several = banner_of_models(Config("a"), ["a", "b"], "http://127.0.0.1:8000", on_demand=True)
    assert several.facts["Models"] == "a, b"
    assert "when a request names it" in several.facts["Runs on"]
    options = RouteOptions(replica=("http://10.0.0.5:8000", "http://10.0.0.6:8000"))
    assert "routes to 2 servers at" in banner_of_gateway(options, "http://127.0.0.1:8000").title


def test_a_gateway_names_only_its_own_flag_to_open_its_page() -> None:
    options = RouteOptions(host="0.0.0.0", replica=("http://10.0.0.5:8000",))
    page = banner_of_gateway(options, "http://127.0.0.1:8000").facts["Page"]
    assert page == "closed: give --open-dashboard to open it for all"
