"""Changes each key of each described type's config.json, and compares what is then described with transformers' model.

    python -m tools.config_mutants [TYPE ...]

A mutant is the config.json of a small model with another value of one key, or with a key that other families read. It
is described as at a start, and its logits in float32 are compared with those that transformers computes by the same
config.json: with the weights of the original if these fit, and with its own if there are differences. Prints what is
wrong, and exits with 1 if anything is. All types take about twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.settings import table
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.states import StateChunk
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.engine.start.load import restore_padding
from tests.engine.model.runners import states_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, batch_of_prompt
from tests.models import small_configs
from tests.models.pinned import PINNED, fill
from tests.models.wrappers import wrapper_config
from tools.config_values import VARIANTS, Values, applied, mutants

SIZES: dict[str, int] = {"num_blocks": 8, "block_size": BLOCK_SIZE}
NUM_TOKENS = 110  # beyond windows, and the lengths from which on rotary embeddings are scaled
TOLERANCE = 1e-4  # norm of the differences, relative to that of the logits
EFFECT = 4 * TOLERANCE  # smaller changes could be missed
_AS_THEY_ARE: Values = {"dtype": torch.float32, "attn_implementation": "eager"}
OPTIONS = EngineOptions(dtype="float32", block_size=BLOCK_SIZE, device="cpu", compile=False)
# What becomes of a mutant. If its description is declined, the words are in the reason.
DECLINED = {
    "a setting that models of the type don't have": "which models of its type don't have",
    "a setting that the tensors contradict": "but a layer has|disagree",
    "a tensor that nothing reads": "its files have a tensor",
    "a tensor that is missing": "its files have no tensor",
    "sizes that don't fit": "fit together|rows|do not have|experts, but its files|gates, .* ups",
    "a value of an unexpected type": "its files cannot be described",
    "a value that the family doesn't have": "",
}
OF_TENSORS = list(DECLINED)[1:5]
EQUAL = "described: the logits change as transformers' do"
NEUTRAL = "described: the logits hardly change, nor do transformers'"
BY_TENSORS = "described by its tensors, whose sizes transformers refuses"
UNREFUSED = "described, though transformers refuses the config.json"
DIFFERENT = "described with other logits"
MISSING = "described without tensors that transformers needs"
FAILED = "an error in place of a reason"
WRONG = (DIFFERENT, MISSING, FAILED)


class Original:
    """A small model of a type in a folder, whose config.json mutants change."""

    def __init__(self, name: str, folder: Path) -> None:
        """`name` is that of a type, or in VARIANTS."""
        self.folder = folder
        model_type = name.partition(",")[0]
        self._auto: Any = AutoModelForCausalLM
        if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            config = PINNED[model_type].config if model_type in PINNED else small_configs.config_of(model_type)
        else:
            self._auto = AutoModelForMultimodalLM
            wrapper = model_type.removesuffix("_text")
            config = wrapper_config(wrapper if wrapper in table()["wrappers"] else f"{wrapper}_thinker")
        config.save_pretrained(folder)
        self._whole = json.loads((folder / "config.json").read_text())
        self.stated = applied(self._whole.get("text_config", self._whole), VARIANTS.get(name, {}))
        self.write(folder, {})
        self.model = self.made(folder)
        self.model.save_pretrained(folder)
        self.logits = cache(lambda length: logits_of(self.model, length))
        if isinstance(found := described(folder), Exception):
            raise found

    def write(self, folder: Path, changes: Values) -> None:
        """Write the config.json with these changes."""
        text = applied(self.stated, changes)
        whole = {**self._whole, "text_config": text} if "text_config" in self._whole else text
        (folder / "config.json").write_text(json.dumps(whole))

    def made(self, folder: Path) -> PreTrainedModel:
        """Make the model of a config.json, with weights that depend on their names. Raises as transformers does."""
        model: PreTrainedModel = self._auto.from_config(AutoConfig.from_pretrained(folder), **_AS_THEY_ARE)
        fill(model)
        model.eval()
        return model

    def loaded(self, folder: Path) -> tuple[PreTrainedModel, Values]:
        """Load a model, and return it with what transformers reports of its tensors. Raises as transformers does."""
        flags = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, report = self._auto.from_pretrained(folder, **_AS_THEY_ARE, **flags)
        restore_padding(model, folder)
        return model.eval(), report


@torch.inference_mode()
def try_mutant(before: Original, changes: Values) -> Iterator[tuple[str, str]]:
    """Yield what becomes of a mutant with the original's weights, and with its own if these differ; and a detail."""
    before.write(before.folder, changes)
    result = described(before.folder)
    if isinstance(result, Exception):
        outcome, detail = reason_of(result)
        yield outcome, detail
        if outcome not in OF_TENSORS:
            return
    try:
        model, report = before.loaded(before.folder)
        misfits = report["missing_keys"] | report["mismatched_keys"]
        own = before.made(before.folder) if misfits or report["unexpected_keys"] else None
        expected = logits_of(model if own is None else own, length_of(result))
        if not expected.isfinite().all():
            raise ValueError("its logits are not finite")
    except Exception as error:  # each class refuses in its own way
        if isinstance(result, Described):
            yield UNREFUSED, f"{type(error).__name__}: {error}"
        return
    if isinstance(result, Described) and misfits:
        yield MISSING if report["missing_keys"] else BY_TENSORS, str(misfits)
    elif isinstance(result, Described):
        yield outcome_of(result, logits_of(model, length_of(result)), before)
    if own is not None:
        with TemporaryDirectory() as folder:
            own.save_pretrained(folder)
            before.write(Path(folder), changes)
            result = described(Path(folder))
            yield outcome_of(result, logits_of(own, length_of(result)), before)


def described(folder: Path) -> Described | Exception:
    """Describe a model as a start does."""
    try:
        return describe_model(ModelSource(str(folder), None, is_local=True), OPTIONS)
    except Exception as error:
        return error


def length_of(found: Described | Exception) -> int:
    """Return how many tokens of the text are compared: as many as the model is good for, if it is described."""
    return NUM_TOKENS if isinstance(found, Exception) else min(NUM_TOKENS, found.spec.max_model_len)


def outcome_of(found: Described | Exception, expected: Tensor, before: Original) -> tuple[str, str]:
    """Return the outcome for a mutant whose logits are these in transformers, and a detail."""
    if isinstance(found, Exception):
        return reason_of(found)
    error = distance(computed(found, len(expected)), expected)
    if not error < TOLERANCE:
        return DIFFERENT, f"{error:.1e}"
    has_effect = distance(before.logits(len(expected)), expected) > EFFECT
    return EQUAL if has_effect else NEUTRAL, f"{error:.1e}"


def reason_of(found: Exception) -> tuple[str, str]:
    """Return why a model is not described, and a detail."""
    reason = str(found)
    if not isinstance(found, NotKnown):
        return FAILED, repr(found)
    return next(words for words, pattern in DECLINED.items() if re.search(pattern, reason)), reason


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm()) if one.shape == other.shape else float("inf")


def logits_of(model: PreTrainedModel, length: int) -> Tensor:
    """Return transformers' logits float32 [length, vocab] of the text that all mutants have."""
    ids = batch_of_prompt(NUM_TOKENS).input_ids[None, :length]
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def computed(found: Described, length: int) -> Tensor:
    """Return the logits float32 [length, vocab] of a description."""
    return logits_by(ReferenceExecutor(found.decoder, dtype=torch.float32, device=CPU, **SIZES), found, length)


def logits_by(executor: Any, found: Described, length: int) -> Tensor:
    """Return the logits float32 [length, vocab] that an executor computes for the text that all mutants have."""
    batch = batch_of_prompt(length)
    batch.logits_rows = torch.arange(length)
    if (states := states_of(found.spec)) is not None:
        batch.states = states.of_step([StateChunk(0, 0, length)])
    logits: Tensor = executor.forward(batch)
    return logits


def tried(types: list[str]) -> tuple[Counter[str], int]:
    """Try the mutants of these types. Return how many had each outcome, and how many are wrong."""
    counts = Counter[str]()
    variants = [name for name in VARIANTS if "," in name and name.partition(",")[0] in types]
    for name in dict.fromkeys((*types, *variants)):
        print(name, flush=True)
        with TemporaryDirectory() as folder:
            before = Original(name, Path(folder))
            for changes in mutants(before.stated, with_others="," not in name):
                for outcome, detail in try_mutant(before, changes):
                    counts[outcome] += 1
                    if outcome in WRONG:
                        print(f"  {changes}: {outcome}: {detail}", flush=True)
    return counts, sum(counts[outcome] for outcome in WRONG)


def be_quiet() -> None:
    """Compute in one thread, without the lines that loading a model writes."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.ERROR)


def main(types: list[str]) -> int:
    be_quiet()
    counts, num_wrong = tried(types or list(FAMILIES))
    print(*(f"{count:7,} {outcome}" for outcome, count in counts.most_common()), sep="\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="or name of a variant; default: all")
    sys.exit(main(parser.parse_args().types))
