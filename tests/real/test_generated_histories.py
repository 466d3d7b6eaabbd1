"""Sends generated histories of three APIs with the chat templates in llama.cpp's source."""

import pytest

from tests.histories.sending import ROUTES, attack, drawn, real_templates


@pytest.mark.usefixtures("llama_cpp")
def test_each_template_renders_generated_histories() -> None:
    templates = real_templates()
    assert len(templates) >= 70
    num_sent, faults = attack(templates, drawn(seed=5, number=4, apis=[*ROUTES]))
    assert num_sent > 15 * len(templates)
    assert faults == []
