"""Make the calls of a run from a description of the workload and a seed."""

from __future__ import annotations

import json
import math
import random
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from loadtest import recordings, sessions
from loadtest.errors import UsageError

# In most current vocabularies each of these words, with the space before it, is one token.
WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education foot boy age policy music market sense nation plan college
interest death experience effect use class control care field development role effort rate heart drug show
leader light voice wife police mind price report decision son view relationship town road arm difference value
building
""".split()  # noqa: SIM905 - shorter to read
DEFAULT_NUM_REQUESTS = 100
MOST_SEEDS = 1_000_000
SEEDS_BETWEEN_RUNS = 1000
# Common vocabularies have these ids, and no special token is among them.
FIRST_ID = 100
LAST_ID = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The options that decide what is sent."""

    num_requests: int | None = None
    """Requests of a run (conversations, with --turns). Default: as many as --requests or, in an open loop,
    --duration-seconds give; else 100, or in a search as many as a decision needs."""

    max_new_tokens: str = "64"
    """Tokens of an answer: a number, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA, choice:A:B:..."""

    stop_on_eos: bool = True
    """Let the model end its answer early. --no-stop-on-eos sends ignore_eos, so each answer has its full length."""

    temperature: float = 0.0
    """Sampling temperature."""

    prompt: str | None = None
    """A text to send. Default: random tokens."""

    prompt_repeats: int = 1
    """How many times each prompt repeats --prompt."""

    unique_prompts: bool = False
    """Begin each prompt of --prompt with its own number, so that the prefix cache has none of it."""

    input_len: str = "128"
    """Tokens of a random prompt, in the forms of --max-new-tokens."""

    random_form: Literal["ids", "words"] = "ids"
    """Send random prompts as token ids (exact lengths, nothing to tokenize; completions only), or as words of about one
    token each."""

    prefix_len: int = 0
    """Tokens of the common prefix of random prompts, in addition to --input-len."""

    prefix_groups: int = 1
    """Number of different common prefixes."""

    turns: int = 1
    """Questions of a conversation, each sent with the answers before it. Needs --endpoint chat."""

    requests: Path | None = None
    """File of JSON lines. Each line is a request ("prompt" or "messages", and any other field of the API), or it has
    lengths ("input_length", "output_length", "prefix"). "timestamp" (seconds) is for --arrival trace. Or sessions in
    Mooncake's form ("session_id", "delay" in ms), or the recording of a server (serve --record-requests), for which
    new prompts are made."""

    abandon_share: float = 0.0
    """Share of the requests whose client disconnects during the answer, 0 to 1."""

    slow_share: float = 0.0
    """Share of the requests whose client reads slowly, 0 to 1."""

    seed: int | None = None
    """Seed of prompts, lengths and arrival times. The same seed gives the same ones. Default: a new one, which the
    report names."""

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--num-requests", DEFAULT_NUM_REQUESTS if self.num_requests is None else self.num_requests, 1),
            ("--prompt-repeats", self.prompt_repeats, 1),
            ("--prefix-len", self.prefix_len, 0),
            ("--prefix-groups", self.prefix_groups, 1),
            ("--turns", self.turns, 1),
        ):
            if value < least:
                raise UsageError(f"{flag} is {value}, but must be at least {least}.")
        for flag, share in (("--abandon-share", self.abandon_share), ("--slow-share", self.slow_share)):
            if not 0 <= share <= 1:
                raise UsageError(f"{flag} is {share:g}, but must be between 0 and 1.")
        if not self.temperature >= 0:
            raise UsageError(f"--temperature is {self.temperature:g}, but must be at least 0.")
        if self.prompt is None and self.prompt_repeats > 1:
            raise UsageError("--prompt-repeats needs a --prompt; random prompts have the length of --input-len.")
        if self.prompt is None and self.unique_prompts:
            raise UsageError("--unique-prompts needs a --prompt; random prompts are unique anyway.")
        length_sampler("--input-len", self.input_len)
        length_sampler("--max-new-tokens", self.max_new_tokens)

    def seeded(self) -> Workload:
        """Return these options with a seed. A new seed keeps a later run from finding its prompts in the prefix
        cache."""
        return replace(self, seed=secrets.randbelow(MOST_SEEDS)) if self.seed is None else self

    def seed_of_run(self, number: int) -> int:
        """Return the seed of the run with this number, so that no run repeats the prompts of an earlier one."""
        return (self.seed or 0) + SEEDS_BETWEEN_RUNS * number


@dataclass(frozen=True, slots=True)
class Turn:
    """A later turn of a conversation: the text that is added after the previous answer, and the pause before it."""

    messages: list[dict[str, Any]]
    max_tokens: int
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """One request or one conversation."""

    prompt: str | list[int]
    max_tokens: int
    next_turns: tuple[Turn, ...] = ()
    leave_after: int | None = None  # number of events after which the client disconnects
    is_slow: bool = False
    timestamp: float | None = None  # seconds, in a trace
    body: dict[str, Any] = field(default_factory=dict)  # other fields of a request that comes from a file


def make_calls(workload: Workload, seed: int) -> list[Call]:
    """Make the calls of one run. Each run has its own `seed`, so that no run repeats the prompts of an earlier one."""
    rng = random.Random(seed)
    output_len = length_sampler("--max-new-tokens", workload.max_new_tokens)
    calls = []
    input_len = length_sampler("--input-len", workload.input_len)
    for prompt, max_tokens, timestamp, body in _prompts(workload, seed, rng):
        max_tokens = int(max_tokens or output_len(rng))
        rows = body.pop("turns", [{}] * (workload.turns - 1))
        turns = tuple(
            Turn(
                row.get("messages") or [_question(rng, int(row.get("input_length") or input_len(rng)))],
                int(row.get("output_length") or max_tokens),
                row.get("delay", 0.0) / 1e3,
            )
            for row in rows
        )
        leaves = rng.random() < workload.abandon_share
        calls.append(
            Call(
                prompt,
                max_tokens,
                turns,
                rng.randint(1, max(1, max_tokens - 1)) if leaves else None,
                rng.random() < workload.slow_share,
                timestamp,
                body,
            )
        )
    return calls


_Prompt = tuple[str | list[int], float | None, float | None, dict[str, Any]]


def _prompts(workload: Workload, seed: int, rng: random.Random) -> Iterator[_Prompt]:
    if workload.requests is not None:
        for row in _rows(workload.requests, workload.num_requests):
            yield _from_row(row, workload, rng)
        return
    input_len = length_sampler("--input-len", workload.input_len)
    prefixes = [_tokens(workload, rng, workload.prefix_len) for _ in range(workload.prefix_groups)]
    for index in range(workload.num_requests or DEFAULT_NUM_REQUESTS):
        if workload.prompt is not None:
            start = f"{seed}-{index}: " if workload.unique_prompts else ""
            yield start + workload.prompt * workload.prompt_repeats, None, None, {}
        else:
            prefix = prefixes[index % len(prefixes)]
            yield prefix + _tokens(workload, rng, input_len(rng)), None, None, {}  # type: ignore[operator]


def _rows(path: Path, limit: int | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(json.loads(line))
                    if not isinstance(rows[-1], dict):
                        raise UsageError(f"--requests: line {number} of '{path}' is not a JSON object.")
                    _check_numbers(rows[-1], f"--requests: line {number} of '{path}'")
                    _check_messages(rows[-1], f"--requests: line {number} of '{path}'")
    except OSError as error:
        raise UsageError(f"--requests is '{path}', which cannot be read: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"--requests: line {number} of '{path}' is not JSON: {error.msg}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--requests: line {number} of '{path}' is not text in UTF-8.") from error
    if rows and recordings.is_recording(rows[0]):
        rows = recordings.prompts_of(rows)
    elif rows and "session_id" in rows[0]:
        rows = sessions.by_session(rows)
    if not rows:
        raise UsageError(f"--requests: there is no request in '{path}'.")
    return rows[:limit]


def _check_numbers(row: dict[str, Any], line: str) -> None:
    for name in ("timestamp", "input_length", "output_length", "max_tokens", "max_completion_tokens", "delay"):
        value = row.get(name, 0)
        if value is None and name.startswith("max_"):  # as in the API: no limit
            continue
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not is_number or (value < 0 and name != "timestamp"):
            least = "" if name == "timestamp" else " of at least 0"
            raise UsageError(f'{line} has "{name}": {json.dumps(value)}, but it must be a number{least}.')


def _check_messages(row: dict[str, Any], line: str) -> None:
    messages = row.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f'{line} has "messages" that are no list of objects.')


def _from_row(row: dict[str, Any], workload: Workload, rng: random.Random) -> _Prompt:
    body = {key: value for key, value in row.items() if key not in _ROW_KEYS}
    timestamp = row.get("timestamp")
    max_tokens = row.get("output_length") or row.get("max_tokens") or row.get("max_completion_tokens")
    prompt = row.get("prompt", "")
    if "recorded" in row:
        prompt = recordings.tokens_of(row["recorded"], partial(_tokens, workload), rng)
    elif "messages" not in body and "prompt" not in row:
        length = int(row.get("input_length") or length_sampler("", workload.input_len)(rng))
        common = min(workload.prefix_len, length) if "prefix" in row else 0
        prompt = _tokens(workload, random.Random(str(row.get("prefix"))), common)
        prompt = prompt + _tokens(workload, rng, length - common)  # type: ignore[operator]
    return prompt, max_tokens, timestamp, body


_ROW_KEYS = {
    *("timestamp", "input_length", "output_length", "prefix", "prompt", "max_tokens", "max_completion_tokens"),
    *("model", "stream", "stream_options", "recorded"),
}


def _tokens(workload: Workload, rng: random.Random, count: int) -> str | list[int]:
    if workload.random_form == "words" or workload.turns > 1:
        return _words(rng, count)
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def _question(rng: random.Random, count: int) -> dict[str, Any]:
    return {"role": "user", "content": _words(rng, count)}


def _words(rng: random.Random, count: int) -> str:
    return "".join(" " + word for word in rng.choices(WORDS, k=count))


def length_sampler(flag: str, spec: str) -> Callable[[random.Random], int]:
    """Return a function that draws whole numbers of at least 1. Raises UsageError unless `spec` has one of the forms of
    --max-new-tokens; the message names `flag`."""
    kind, _, rest = spec.partition(":")
    try:
        numbers = [float(number) for number in rest.split(":") if rest]
        match kind, numbers:
            case "uniform", [low, high] if 1 <= low <= high:
                return lambda rng: rng.randint(int(low), int(high))
            case "normal", [mean, deviation] if mean >= 1:
                return lambda rng: max(1, round(rng.gauss(mean, deviation)))
            case "lognormal", [median, sigma] if median >= 1:
                return lambda rng: max(1, round(median * rng.lognormvariate(0, sigma)))
            case "choice", [_, *_] if min(numbers) >= 1:
                return lambda rng: int(rng.choice(numbers))
            case _, [] if int(kind) >= 1:
                return lambda rng: int(kind)
    except ValueError:
        pass  # not a number: rejected below like any other invalid form
    raise UsageError(
        f"{flag} is '{spec}', but must be a number of at least 1, or uniform:LOW:HIGH, normal:MEAN:DEVIATION, "
        "lognormal:MEDIAN:SIGMA or choice:A:B:..."
    )
