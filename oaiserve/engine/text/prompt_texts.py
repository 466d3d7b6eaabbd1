"""Which part of a prompt's text each of its tokens stands for, so that log-probabilities can point into the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from oaiserve.engine.text.detokenize import TokenTable


def text_parts(
    table: TokenTable, token_ids: Sequence[int], text: str | None, starts: Callable[[], Sequence[int]]
) -> Iterator[str]:
    """Yield the part of the text for each token: joined, the parts are the text. Without a text, it is the tokens' own.

    A character that is split over several tokens is the part of the last of them. Where the tokenizer has changed the
    text, its tokens have other characters, so the parts are where it says that its tokens start: `starts` is called
    only then.
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
            bounds = starts()
        end = at + len(part) if bounds is None else max([at, *bounds[number : number + 1]])
        end = len(text) if is_last else end
        yield text[at:end]
        at = end
