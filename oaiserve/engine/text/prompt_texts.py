"""Maps the tokens of a prompt to parts of its text, so that log-probabilities have offsets in the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from oaiserve.engine.text.detokenize import TokenTable


def text_parts(
    table: TokenTable, token_ids: Sequence[int], text: str | None, starts: Callable[[], Iterator[int]]
) -> Iterator[str]:
    """Yield the part of the text for each token. Joined, the parts are the text, or if that is None, the tokens' texts.

    A character that is split over several tokens belongs to the last of them. If the tokenizer has normalized the text,
    its tokens contain other characters. Only then is `starts` called, which yields where each token starts.
    """
    detokenizer = table.detokenizer((), skip_special_tokens=False)
    at = 0
    bounds = None
    for number, token_id in enumerate(token_ids, start=1):
        part = detokenizer.push(token_id)
        is_last = number == len(token_ids)
        if is_last:
            part += detokenizer.finish()
        if text is None:
            yield part
            continue
        if bounds is None and not text.startswith(part, at):
            bounds = islice(starts(), number, None)
        end = at + len(part) if bounds is None else max(at, next(bounds, at))
        end = len(text) if is_last else end
        yield text[at:end]
        at = end
