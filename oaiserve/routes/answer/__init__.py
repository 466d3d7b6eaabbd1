"""Answer: how an answer is written.

- respond.py submits a request and sends its answer, whole or streamed. A `Shape` (shape.py) renders the bytes.
- common_shape.py has what chat and completions share, and chat_shape.py the shape of chat. completions.py has its own.
- logprobs.py renders log-probabilities, and sse.py server-sent events.
- continued.py renders a stream that another server can continue.
- feed.py sends the same messages to many viewers, document.py documents in JSON, and paging.py lists in pages.
"""
