"""The limits that every attack has to keep, and the sentences for what does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from statistics import median
from urllib.parse import urlsplit

from loadtest.intervals import percentile
from oaiserve.errors import OLLAMA_PATHS
from tools.attack.attack import Attack
from tools.attack.measure import Result
from tools.attack.wire import Answer

MOST_ITL_SECONDS = 0.5  # during accepted work, in place of the attack's `most_itl_ratio`
MOST_RSS_GROWTH_MIB = 100.0
MOST_RSS_PEAK_MIB = 1024.0  # above what it was before, while the attack lasts
MOST_GROWTH_MIB = 24.0  # from one half of the rounds that count to the other
MOST_MORE = 4  # files and threads: pools grow to their size
MOST_HEALTH_SECONDS = 2.0
MOST_TTFT_SECONDS = 10.0  # for the prober's small requests
MOST_LOG_BYTES_PER_REQUEST = 2048  # about two lines of the log
FREE_LOG_BYTES = 64 * 1024  # for what is not about a request
ERROR_KEYS = {"message", "type", "param", "code"}
MOST_MESSAGE_CHARACTERS = 1000


def failures(attack: Attack, result: Result) -> list[str]:
    """Return a sentence for each limit that was not kept."""
    faults = list(result.problems)
    neighbour_got = {each: number for each, number in result.neighbour_outcomes.items() if each != "200"}
    num_requests = result.num_sent + result.num_harmless + sum(result.neighbour_outcomes.values())
    most_log = FREE_LOG_BYTES + MOST_LOG_BYTES_PER_REQUEST * num_requests
    missing = result.num_sent - len(result.answers)
    peak_mib = result.rss_peak_mib - result.rss_before_mib
    slowest = max(result.ttft_attack, default=0.0)
    if result.state != "alive":
        faults.append(f"the server {result.state}")
    if missing:
        faults.append(f"{missing} of {result.num_sent} requests without an answer")
    for sentence, number in Counter(wrong(attack, answer) for answer in result.answers).items():
        if sentence is not None:
            faults.append(sentence if number == 1 else f"{number} times: {sentence}")
    if result.itl_ratio is None:
        faults.append("the neighbour had no tokens to measure")
    elif attack.is_work:
        if (seconds := percentile(sorted(result.itl_attack), 99)) > MOST_ITL_SECONDS:
            faults.append(f"the neighbour's ITL p99 was {seconds:.2f} s (most {MOST_ITL_SECONDS:g} beside work)")
    elif result.itl_ratio > attack.most_itl_ratio:
        faults.append(f"the neighbour's ITL p99 grew by {result.itl_ratio:.2f} (most {attack.most_itl_ratio:g})")
    most = attack.most_ratio_to_harmless
    if attack.harmless is not None and result.itl_ratio is not None:
        if (ratio := result.ratio_to_harmless) is None:
            faults.append("the neighbour had no tokens beside harmless requests")
        elif ratio > most:
            faults.append(f"the neighbour's ITL p99 was {ratio:.2f} times that beside harmless ones (most {most:g})")
    if slowest > MOST_TTFT_SECONDS:
        faults.append(f"the prober's first token took {slowest:.1f} s (most {MOST_TTFT_SECONDS:.0f})")
    if result.rss_growth_mib > MOST_RSS_GROWTH_MIB:
        faults.append(f"{result.rss_growth_mib:.0f} MiB stayed (most {MOST_RSS_GROWTH_MIB:.0f})")
    if peak_mib > MOST_RSS_PEAK_MIB:
        faults.append(f"it took {peak_mib:.0f} MiB more for a while (most {MOST_RSS_PEAK_MIB:.0f})")
    if set(result.health_outcomes) - {"200"}:
        faults.append(f"/health answered {_list(result.health_outcomes)}")
    elif result.health_seconds > MOST_HEALTH_SECONDS:
        faults.append(f"/health took {result.health_seconds:.1f} s (most {MOST_HEALTH_SECONDS:g})")
    if neighbour_got:
        faults.append(f"the neighbour got {_list(neighbour_got)}")
    if result.log_bytes > most_log:
        faults.append(f"{result.log_bytes:,} bytes of log (most {most_log:,})")
    return faults


def growth(results: Sequence[Result]) -> list[str]:
    """Return a sentence for each thing that a server holds more of from round to round of an attack. The first third of
    the rounds does not count, in which the server fills what it keeps within bounds, such as compiled grammars."""
    steady = results[len(results) // 3 :]
    half = len(steady) // 2
    faults = []
    for what, most, values in (
        ("MiB of memory", MOST_GROWTH_MIB, [result.rss_after_mib for result in steady]),
        ("open files", MOST_MORE, [result.num_files for result in steady]),
        ("threads", MOST_MORE, [result.num_threads for result in steady]),
    ):
        if half and (more := median(values[-half:]) - median(values[:half])) > most:
            faults.append(f"{more:.0f} more {what} in the later half of the rounds (most {most:g})")
    return faults


def has_ollamas_error(answer: Answer) -> bool:
    """Return whether the answer of a route of Ollama's API has its error, a message."""
    _, _, target = answer.sent.partition(b" ")
    if urlsplit(target.split(b" ")[0]).path.decode(errors="replace") not in OLLAMA_PATHS:
        return False
    try:
        body = json.loads(answer.body)
    except ValueError:
        return False
    return isinstance(body, dict) and isinstance(body.get("error"), str)


def wrong(attack: Attack, answer: Answer) -> str | None:
    """Return the fault of the answer, or None."""
    if answer.outcome == "timeout":
        return None if "timeout" in attack.outcomes else f"no answer within {attack.answer_seconds:.0f} s"
    status = answer.status or 0
    if b'"internal_error"' in answer.body or (
        status >= 500 and status != 503 and answer.outcome not in attack.outcomes
    ):
        return f"got {status}{_excerpt(answer)}, and had asked {answer.sent!r}"
    if answer.outcome not in attack.outcomes:
        return f"got {answer.outcome}{_excerpt(answer) if status >= 400 else ''}"
    if status < 400:
        return None
    if status == 503 and "retry-after" not in answer.headers:
        return "got a 503 without retry-after"
    error = answer.error
    if error is None and has_ollamas_error(answer):
        return None
    if error is None or not error.keys() >= ERROR_KEYS:
        has_none = answer.sent.startswith(b"HEAD ") or (attack.bare and status in (400, 408, 431, 503))
        return None if has_none else f"got a {status} without OpenAI's error object{_excerpt(answer)}"
    if len(error["message"]) > MOST_MESSAGE_CHARACTERS:
        return f"got a message of {len(error['message'])} characters"
    return None


def _excerpt(answer: Answer) -> str:
    return f": {answer.body[:80].decode(errors='replace')}" if answer.body else ""


def _list(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{outcome} x {number}" for outcome, number in sorted(outcomes.items()))
