"""What outlines keep of the options that clients send."""

import pytest

from oaiserve.routes.intake.outlines import MAX_OPTIONS, _options


def test_options_are_parts_by_their_names() -> None:
    options = _options({"enable_thinking": False, "date": "today"})
    assert list(options) == ["enable_thinking", "date"]
    assert options["date"] != _options({"date": "tomorrow"})["date"]


@pytest.mark.parametrize(
    "kwargs", [{f"k{i}": 1 for i in range(MAX_OPTIONS + 1)}, {"x" * 1_000_000: 1}], ids=["many", "a long name"]
)
def test_names_that_clients_make_up_take_no_memory(kwargs: dict[str, int]) -> None:
    options = _options(kwargs)
    assert list(options) == ["chat_template_kwargs"]
    assert options != _options({**kwargs, "more": 1})
