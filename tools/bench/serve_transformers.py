"""Runs `transformers serve` in its environment, with two changes that the load generator needs.

Unchanged, it refuses fields that OpenAI's schema does not have, such as ignore_eos, and it sends the usage with the
last piece of text, where the load generator expects an event of its own.
"""

import sys

from transformers.cli.serving import completion, utils
from transformers.cli.transformers import main

build_event = completion.CompletionHandler._build_chunk_sse


def usage_apart(self, request_id, model_id, text="", finish_reason=None, usage=None):
    if usage is None:
        return build_event(self, request_id, model_id, text=text, finish_reason=finish_reason)
    last = completion.Completion.model_construct(
        id=request_id, object="text_completion", created=0, model=model_id, choices=[], usage=usage
    )
    return self.chunk_to_sse(last)


utils.BaseHandler._validate_request = lambda self, body: None
completion.CompletionHandler._build_chunk_sse = usage_apart
sys.argv[0] = "transformers"
main()
