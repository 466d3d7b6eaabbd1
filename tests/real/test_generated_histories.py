"""Sends generated histories of three APIs with the chat templates in llama.cpp's source."""

import asyncio
import json

import pytest

from tools.attack.histories import ROUTES, attack, drawn, real_templates


@pytest.mark.usefixtures("llama_cpp")
def test_each_template_renders_generated_histories() -> None:
    templates = real_templates()
    assert len(templates) >= 70
    num_sent, faults = asyncio.run(attack(templates, drawn(seed=5, number=4, apis=[*ROUTES]), shrinks=False))
    assert num_sent > 15 * len(templates)
    assert [json.dumps(fault.as_json()) for fault in faults] == []
