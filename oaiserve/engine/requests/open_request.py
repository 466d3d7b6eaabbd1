"""One open request: its state from its submission to its terminal event, and the bounds of all requests. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from oaiserve.engine.accounts.step_account import RequestNotes
from oaiserve.engine.request import Deliver, Request, Usage
from oaiserve.engine.requests.output import ChoiceOutput
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.tokenize import Tokenized
from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.explain.causes import RequestCauses
from oaiserve.explain.step_cost import Work
from oaiserve.facts.lost_prefix import LostPrefix
from oaiserve.facts.record import EngineAccount
from oaiserve.facts.times import RequestTimes


@dataclass(frozen=True, slots=True)
class Bounds:
    max_model_len: int  # tokens of prompt and answer together
    queue_timeout_seconds: float = 0  # time limit in the queue; 0: no limit
    request_timeout_seconds: float = 0  # time limit of the whole request; 0: no limit
    # Limit for answers whose requests set none. None: only the context limits them.
    default_max_tokens: int | None = None
    default_max_length: int | None = None  # maximum length including the prompt, if that is lower

    def length(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the maximum length of a prompt together with its answer."""
        if max_tokens is not None:
            return min(num_prompt_tokens + max_tokens, self.max_model_len)
        length = self.max_model_len
        if self.default_max_tokens is not None:
            length = min(length, num_prompt_tokens + self.default_max_tokens)
        if self.default_max_length is not None and num_prompt_tokens < self.default_max_length:
            length = min(length, self.default_max_length)
        return length


@dataclass(slots=True)
class OpenPrompt:
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    texts: list[str] | None = None
    cached_tokens: int = 0
    lost: LostPrefix | None = None
    sent: bool = False


@dataclass(slots=True)
class OpenRequest:
    """The state of a request from its submission to its terminal event."""

    request: Request
    deliver: Deliver
    times: RequestTimes
    account: EngineAccount
    notes: RequestNotes
    causes: RequestCauses | None = None  # None if times aren't divided into causes
    prompts: list[OpenPrompt] = field(default_factory=list)
    outputs: dict[Sequence, ChoiceOutput] = field(default_factory=dict)  # choices that haven't finished
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    waiting_tokens: int = 0  # tokens of its prompts, until it enters a step
    num_waiting: int = 0  # choices that haven't entered a step
    needs_ids: bool = False  # see Sequence
    held_ns: float = 0.0  # total of its ended sequences, see Sequence
    progress_ns: int | None = None  # when its progress was last reported

    @property
    def has_all_prompts(self) -> bool:
        """Return whether all prompts have sequences. Those whose media aren't encoded yet have none."""
        return len(self.prompts) == len(self.request.prompts)

    def note_tokenized(self, tokenized: Tokenized) -> None:
        self.times.tokenized = tokenized.at_ns
        self.times.has_media = any(tokenized.media)

    def note_prompts(self, tokenized: Tokenized) -> None:
        """Count the tokens and media of its prompts, once it is admitted."""
        self.usage.prompt_tokens = tokenized.num_prompt_tokens
        for medium in (one for prompt in tokenized.media if prompt is not None for one in prompt.media):
            self.account.media.note(medium.kind, medium.num_rows)
        self.usage.image_tokens = self.account.media.image_tokens
        self.usage.audio_tokens = self.account.media.audio_tokens
        self.account.prompts = tokenized.token_ids
        self.account.cache_salt = self.request.cache_salt

    def note_choice(self, sequence: Sequence, output: ChoiceOutput) -> None:
        """Note the length of a choice that has ended, and the loop that it ends in, if any."""
        self.account.note_length(output.num_tokens)
        if (loop := output.loop_in(sequence.generated_ids)) is not None:
            self.account.note_loop(*loop)

    @property
    def work(self) -> Work:
        """Return the work of this request, so that its time can be compared with the learned costs.

        Tokens that another server generated count as prompt tokens, because they are computed like these.
        """
        num_continued = self.account.num_continued_tokens
        return Work(
            len(self.prompts),
            self.usage.prompt_tokens + num_continued,
            self.usage.cached_tokens,
            self.account.num_choices,
            self.usage.completion_tokens - num_continued,
            self.account.longest_choice_tokens - num_continued // max(1, self.account.num_choices),
            self.needs_ids,
        )

    def count_cached(self, sequence: Sequence) -> None:
        """Count the cached tokens of a prompt as its first choice enters its first step.

        Every report of a request's cached tokens comes from here, however far the request gets."""
        if sequence.index % self.request.params.n == 0:
            prompt = self.prompts[sequence.index // self.request.params.n]
            prompt.cached_tokens = min(sequence.num_cached, sequence.prompt_len)
            prompt.lost = sequence.lost
            self.usage.cached_tokens += prompt.cached_tokens

    @property
    def computed_prompt_tokens(self) -> int:
        """Return the number of computed prompt tokens, including cached ones. Any thread may call this.

        The tokens of the current step are included at once on a GPU, and at the end of the step on a CPU.
        """
        if self.times.scheduled is None:
            return 0
        missing = [
            max(0, sequence.prompt_len - sequence.num_computed)
            for sequence in self.outputs.copy()
            if sequence.index % self.request.params.n == 0 and sequence.last_token_ns is None
        ]
        missing += map(len, self.account.prompts[len(self.prompts) :])
        return max(0, self.usage.prompt_tokens - sum(missing))
