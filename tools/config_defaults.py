"""Writes the defaults of transformers' config classes, which a model's settings have for missing keys.

python -m tools.config_defaults [TYPE ...] renews oaiserve/engine/decoder/defaults.json, and adds these types to it. A
later version of transformers must not change what a published file means, so read the difference before it is kept.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import MISSING, fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from oaiserve.engine.decoder.settings import DEFAULTS, WITHOUT_USE, table
from oaiserve.engine.model.transformers_files.wrapper import text_config

_LEFT_OUT = {field.name for field in fields(PreTrainedConfig)} | WITHOUT_USE


def main(added: list[str]) -> None:
    types = {name: defaults_of(CONFIG_MAPPING[name]) for name in sorted({*table()["types"], *added})}
    wrappers = {name: text_of(CONFIG_MAPPING[name]) for name in sorted(table()["wrappers"])}
    rows = {name: shortest(name, types) for name in types}
    DEFAULTS.write_text(f'{{"wrappers": {in_lines(wrappers)}, "types": {in_lines(rows)}}}\n')


def shortest(name: str, types: dict[str, Any]) -> dict[str, Any]:
    """Return a type's row with the defaults that differ from those of the type before it that is most like it."""
    own = types[name]
    rows = [own]
    for other in sorted(name_of_other for name_of_other in types if name_of_other < name):
        before = types[other]["keys"]
        keys = {key: value for key, value in own["keys"].items() if key not in before or differs(value, before[key])}
        without = [key for key in before if key not in own["keys"]]
        rows.append({"like": other} | ({"without": without} if without else {}) | {**own, "keys": keys})
    return min(rows, key=lambda row: len(json.dumps(row)))


def differs(one: Any, other: Any) -> bool:
    """Tell 1 from 1.0 and True, too."""
    return json.dumps(one) != json.dumps(other)


def in_lines(rows: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n}"


def text_of(kind: Any) -> dict[str, Any]:
    """Return a multimodal model's type of text model, when its embedding is tied without its own word, and how many
    layers of it images reach.
    """
    text_type = kind().get_text_config(decoder=True).model_type
    tied = {"tie_word_embeddings": True}
    not_tied = {"tie_word_embeddings": False}
    by_default, by_text, against_wrapper = (
        text_config(kind(**own, text_config={"model_type": text_type, **of_text})).tie_word_embeddings
        for own, of_text in (({}, {}), ({}, tied), (not_tied, tied))
    )
    num_deep = getattr(text_config(kind()), "num_deep_layers", 0)
    facts = {"tied": by_default, "tied_by_text": by_text, "against_wrapper": against_wrapper, "num_deep": num_deep}
    return {"text": text_type} | {name: fact for name, fact in facts.items() if fact}


def defaults_of(kind: Any) -> dict[str, Any]:
    """Return the facts of a class: defaults of its keys, other names of these, and its base of rotary frequencies."""
    facts: dict[str, Any] = {"keys": {}}
    for field in fields(kind):
        if field.name not in _LEFT_OUT:
            facts["keys"][field.name] = field.default if field.default is not MISSING else field.default_factory()
    aliases = {alias: name for alias, name in kind.attribute_map.items() if name in facts["keys"]}
    # Newer files have some keys under names that are no fields of the class.
    aliases |= {name: key for key, name in kind.attribute_map.items() if key in facts["keys"] and name not in aliases}
    if aliases:
        facts["aliases"] = aliases
    if kind.default_theta != 10_000.0:
        facts["rope_theta"] = kind.default_theta
    return facts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    main(parser.parse_args().types)
