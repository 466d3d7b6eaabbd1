"""Names for plug-ins with `families`, `gguf_architectures` and `sampling_rules`.

A `Family` says how a model type differs from one that is known, often only by the names of its tensors. A GGUF
`Architecture` gives the same for GGUF files:

>>> finch = Family(type="finch", like="llama", other_names={"head": "lm_head"})
>>> Architecture(name="finch", type=finch.type).name
'finch'

A `Rule` edits the logits of one draw, for which its maker gets the model's `Tokenizer`:

>>> def forbid_first(logits: list[float], answer_ids: list[int]) -> None:
...     logits[0] = float("-inf")
>>> rule: Rule = forbid_first
>>> def rules(tokenizer: Tokenizer) -> list[Rule]:
...     return [rule]
"""

from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.types.sampling_rule import Rule

__all__ = ["Architecture", "Family", "Rule", "Tokenizer"]
