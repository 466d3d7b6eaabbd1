"""Render a report as text, from the same dictionary that becomes JSON. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from loadtest.client_health import VERDICTS
from loadtest.engine_summary import render_engine
from loadtest.measure import LEAST_STEADY, distribution
from loadtest.tables import Rows, interval, ms, number, table, times_rows

_SEVERAL_TOKENS = 1.05  # With more tokens per event on average, gaps are reported between events, not tokens.
TIMES = {
    "send_lag": "Send lag",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "latency": "Latency",
}


def render(report: dict[str, Any]) -> str:
    """Return the whole report as text, with times in milliseconds."""
    machine = report["environment"]
    blocks = [
        f"Load test of {subject(report)}, {report['created']}, {machine['cpus']} CPUs, "
        f"load average {machine['load_average']:.1f}\nwith {made_with(report)}"
    ]
    for point in report["points"]:
        if is_in_process(report):
            blocks += [render_engine(point, report["engine"]), "\n".join(problems(point["runs"]))]
        else:
            blocks.append(_metrics(point))
        blocks += [_client(point), _server(point)]
    if len(report["points"]) > 1:
        blocks.append(table(sweep_rows(report["points"])))
    return "\n\n".join(block for block in blocks if block) + "\n"


def made_with(report: dict[str, Any]) -> str:
    """Return the versions of the client, on which its times depend, and the seed of its prompts."""
    machine = report["environment"]
    parts = {"Python": machine["python"], **machine["versions"], "--seed": report["workload"]["seed"]}
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)


def is_in_process(report: dict[str, Any]) -> bool:
    return bool(report.get("target") == "engine")  # older reports have no target


def subject(report: dict[str, Any]) -> str:
    """Return the name of what was measured: the model, and the server's URL or that there was none."""
    if is_in_process(report):
        return f"{report['engine']['model']}, the engine in process"
    return f"{report['http'].get('model')} at {report['http']['url']}"


def _metrics(point: dict[str, Any]) -> str:
    runs = point["runs"]
    lines = [f"== {point_title(point)}, {len(runs)} run{'s' * (len(runs) > 1)}", *count_lines(runs)]
    lines += problems(runs)
    lines += ["", table(rate_rows(point)), "", table(times_rows(point["summary"], TIMES))]
    lines += steady_lines(runs[0]["metrics"]["steady"])
    lines.append(
        "95 %: intervals over the repeats" if len(runs) > 1 else "one run has no intervals: use --repeats for some"
    )
    return "\n".join(lines)


def count_lines(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines on the requests and tokens of a point."""
    first = runs[0]["metrics"]
    return [
        *_read_again(runs),
        f"requests {sum(r['metrics']['num_requests'] for r in runs)}, ok {sum(r['metrics']['num_ok'] for r in runs)}, "
        f"abandoned {sum(r['metrics']['num_abandoned'] for r in runs)}, "
        f"prompt tokens {first['prompt_tokens']:,} ({first['cached_tokens']:,} cached), "
        f"completion tokens {first['completion_tokens']:,} (from {first['token_counts_from']})"
        + (" in the first run" if len(runs) > 1 else ""),
    ]


def has_slo(point: dict[str, Any]) -> bool:
    return bool(point["runs"][0]["metrics"]["slo_attainment"].keys() - {"all"})


def rate_rows(point: dict[str, Any]) -> Rows:
    summary = point["summary"]
    rates = (
        ("requests/s", "requests_per_second"),
        ("completion tokens/s", "completion_tokens_per_second"),
        ("completion tokens/s, steady", "steady_completion_tokens_per_second"),
        ("total tokens/s", "total_tokens_per_second"),
        ("sessions/hour", "sessions_per_hour"),
        ("goodput, requests/s", "goodput_per_second"),
        ("SLO attainment", "slo_attainment"),
    )
    rows = [
        [title, number(summary[name]["mean"]), interval(summary[name], number)]
        for title, name in rates
        if name in summary and (has_slo(point) or name not in ("goodput_per_second", "slo_attainment"))
    ]
    return [["", "mean", "95 %" if len(point["runs"]) > 1 else ""], *rows]


def _read_again(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line on the prompt tokens that the server read again in all runs; no line if there are none."""
    shares = [again for run in runs if (again := (run.get("server") or {}).get("read_again"))]
    tokens: Counter[str] = Counter()
    for again in shares:
        tokens.update(again["tokens"])
    if not tokens:
        return []
    prompt = sum(run["metrics"]["prompt_tokens"] for run in runs)
    number_again = sum(tokens.values())
    took = sum(again["seconds"] for again in shares)
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in tokens.most_common())
    share = number_again / max(1, prompt)
    return [f"read again: {number_again:,} of {prompt:,} prompt tokens ({share:.0%}), in {took:.1f} s ({reasons})"]


def problems(runs: Sequence[dict[str, Any]]) -> list[str]:
    errors = [f"ERROR {error}" for error in errors_of(runs)]
    return errors + [f"OVERSATURATED: {run['oversaturated']}" for run in runs if run["oversaturated"]]


def errors_of(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return each kind of error in any of the runs with its count and the server's message to the first one."""
    counts: Counter[str] = Counter()
    messages: dict[str, str] = {}
    for run in runs:
        counts.update(run["metrics"]["errors"])
        messages = run["metrics"]["error_messages"] | messages
    return [
        f"{kind}: {count}" + (f" (the first: {messages[kind]})" if kind in messages else "")
        for kind, count in sorted(counts.items())
    ]


def failed_requests(points: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return how many requests failed in all runs, and how many there were, not counting abandoned ones."""
    metrics = [run["metrics"] for point in points for run in point["runs"]]
    failed = sum(sum(each["errors"].values()) for each in metrics)
    return failed, sum(each["num_requests"] - each["num_abandoned"] for each in metrics)


def steady_lines(steady: dict[str, Any] | None) -> list[str]:
    """Return a line about the steady state of the first run, if it has enough requests."""
    if steady is None or steady["num_requests"] < LEAST_STEADY:
        return []
    ttft, tpot, latency = (steady["distributions"][name] or {} for name in ("ttft", "tpot", "latency"))
    return [
        f"steady, {steady['from_seconds']:.1f} to {steady['to_seconds']:.1f} s ({steady['num_requests']} requests): "
        f"TTFT p50 {ms(ttft.get('p50'))}, p99 {ms(ttft.get('p99'))}, TPOT p50 {ms(tpot.get('p50'))}, "
        f"latency p50 {ms(latency.get('p50'))}, p99 {ms(latency.get('p99'))}"
    ]


def _client(point: dict[str, Any]) -> str:
    return "\n".join([f"client: {point['verdict']}", *(f"  {line}" for line in client_lines(point))])


def client_lines(point: dict[str, Any]) -> list[str]:
    """Return the lines about the client's health, from the run with the worst verdict."""
    run = max(point["runs"], key=lambda run: VERDICTS.index(run["client"]["verdict"]))
    client = run["client"]
    metrics = run["metrics"]
    lag = metrics["distributions"]["send_lag"]
    lines = [f"because {reason}" for reason in client["reasons"]]
    lines += [f"note: {note}" for note in client.get("notes", ())]  # older reports have none
    if lag:
        lines.append(
            f"send lag p50 {ms(lag['p50'])} ms, p99 {ms(lag['p99'])} ms, max {ms(lag['max'])} ms; "
            f"sent late: {client['late_share']:.1%}"
        )
    if client["offered_requests_per_second"] is not None:
        lines.append(
            f"offered {number(client['offered_requests_per_second'])} requests/s, "
            f"achieved {number(client['achieved_requests_per_second'])}"
        )
    for process in client["processes"]:
        loop = process["loop_lag_seconds"]
        lines.append(
            f"process: CPU {process['cpu_share']:.0%} of a core, "
            + (f"loop lag p99 {ms(loop['p99'])} ms, max {ms(loop['max'])} ms, " if loop else "")
            + f"gc {ms(process['gc_seconds'])} ms, {process['peak_memory_bytes'] / 2**20:.0f} MiB"
            + (f", {process['num_connections']} connections" if loop else "")
        )
    if metrics["tokens_per_event"] is not None:
        gaps = ", so ITL is the gap of events, not of tokens" if metrics["tokens_per_event"] >= _SEVERAL_TOKENS else ""
        lines.append(
            f"tokens per event {metrics['tokens_per_event']:.2f}{gaps}, "
            f"events per read {metrics['events_per_read']:.2f}"
        )
    if gauges := run.get("server", {}).get("gauges"):
        lines.append(_gauge_reads(gauges, metrics["window_seconds"]))
    if client["ceiling"] is not None:
        limits = client["ceiling"]
        lines.append(
            f"ceiling: {limits['event_cpu_seconds'] * 1e6:.1f} us a streamed event "
            f"({0.1 / limits['event_cpu_seconds']:,.0f} per second and 10 % of a core), "
            f"{limits['request_cpu_seconds'] * 1e6:.0f} us a request; used in this run: {client['load_of_ceiling']:.0%}"
        )
    return lines


def _gauge_reads(gauges: dict[str, Any], seconds: float) -> str:
    """Return a line about the cost of reading the server's gauges during the run."""
    text = f"server's gauges: read {gauges['num_reads']} times by a process that sends nothing"
    if gauges["num_reads"]:
        text += (
            f" (CPU {gauges['cpu_seconds'] / seconds:.1%} of a core), "
            f"each within {ms(gauges['mean_seconds'])} ms, max {ms(gauges['max_seconds'])} ms"
        )
    return text + (f"; {gauges['num_failed']} reads failed" if gauges["num_failed"] else "")


def _server(point: dict[str, Any]) -> str:
    """Return lines that compare the server's view of the last run with the client's."""
    if "server" not in point["runs"][-1]:
        return ""
    rows = server_rows(point)
    return "\n".join([server_line(point), *([table(rows)] if len(rows) > 1 else [])])


def disagrees(point: dict[str, Any]) -> bool:
    """Return whether server and client disagree about any run."""
    return any(run.get("server", {}).get("check", {}).get("status") == "disagree" for run in point["runs"])


def point_title(point: dict[str, Any]) -> str:
    """Return the label of a point with its verdict, and a note if the server contradicts the figures of a valid
    client."""
    if point["verdict"] != "valid" or not disagrees(point):
        return f"{point['label']}: {point['verdict']}"
    return f"{point['label']}: server {'shared' if others(point) else 'disagrees'}"


def others(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how much other clients used the server, for each run with other clients."""
    return [found for run in point["runs"] if (found := run.get("server", {}).get("others"))]


def server_line(point: dict[str, Any]) -> str:
    check = point["runs"][-1]["server"]["check"]
    loud = "DISAGREE" if check["status"] == "disagree" else check["status"]
    return f"server and client: {loud}" + (f" ({check['reason']})" if check["reason"] else "")


def server_rows(point: dict[str, Any]) -> Rows:
    """Return the phases of the last run, and its means in the server's metrics."""
    run = point["runs"][-1]
    server = run["server"]
    means = server.get("means", {})
    rows = []

    def cells(values: dict[str, float]) -> list[str]:
        return [ms(values[key]) for key in ("mean", "p50", "p95", "p99")]

    for name, values in run["metrics"]["phases"].items():
        rows.append([name.replace("_", " "), *cells(values), ms(means.get(name))])
    for name, title in (("first_token", "network + client"), ("last_token", "  the same, whole request")):
        if values := server["rest"][name]:
            rows.append([title, *cells(values), ""])
    if rows:
        ttft = distribution([r["ttft"] - r["send_lag"] for r in run["requests"] if r["ttft"] is not None])
        if ttft:
            rows.append(["client: TTFT from send", *cells(ttft), ms(means.get("ttft"))])
    else:
        rows = [[name, "", "", "", "", ms(mean)] for name, mean in means.items() if mean is not None]
    return [["ms, per request", "mean", "p50", "p95", "p99", "mean of /metrics"], *rows]


def sweep_rows(points: Sequence[dict[str, Any]]) -> Rows:
    """Return a table as rows of cells: the head, then a row for each point."""
    names = ("requests_per_second", "completion_tokens_per_second", "ttft_p50", "ttft_p99", "tpot_p50", "latency_p99")
    rows = []
    for point in points:
        entries = [point["summary"].get(name) for name in names]
        cells = [
            "-" if entry is None else (number if name.endswith("second") else ms)(entry["mean"])
            for name, entry in zip(names, entries, strict=True)
        ]
        over = "yes" if any(run["oversaturated"] for run in point["runs"]) else "no"
        errors = sum(count for run in point["runs"] for count in run["metrics"]["errors"].values())
        rows.append([point["label"], *cells, f"{errors:,}", over, point["verdict"]])
    times = ("TTFT p50, ms", "p99", "TPOT p50", "latency p99")
    return [["", "requests/s", "tokens/s", *times, "errors", "oversaturated", "client"], *rows]
