"""The runs of all replicas of a gateway. A run whose turns were served by several of them is one run.

Replicas give a run that its client names the same id. A run that no client names has a different id on each replica,
and is found by the digests of its prompts: the first turn on a replica continues one that another has answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oaiserve.plugin.parts import AskReplicas
from oaiserve.plugins.runs.kept_runs import MAX_RUNS, Turns
from oaiserve.plugins.runs.routes import FORM, RunList, missing, run_response
from oaiserve.plugins.runs.turns import KeptTurn, Run, RunRow, row_of
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.operation import read_query

MAX_JOINED = 20  # Most runs in a list that span several replicas; each costs more requests to them.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Part(NamedTuple):
    """The part of a run that one replica served."""

    replica: int
    row: RunRow


def routes(path: str, ask: AskReplicas) -> list[Route]:
    """Return the routes for /debug/runs, whose `path` is the same on the replicas."""

    async def groups_of(request: Request) -> list[list[Part]] | Response:
        answers = await ask(request, f"{path}?form=gateway")
        return answers if isinstance(answers, Response) else await run_in_threadpool(joined, _rows(answers))

    async def whole(request: Request, run_id: str, group: Iterable[Part]) -> Turns | None:
        """Return the turns of a group, or None if no replica has them any more."""
        found: list[tuple[int, Run]] = []
        for part_id in dict.fromkeys(part.row.run_id for part in group):
            answers = await ask(request, f"{path}/{part_id}")
            if not isinstance(answers, Response):
                found += await run_in_threadpool(_runs, answers)
        turns = [_at(replica, shown.turn) for replica, run in found for shown in run.turns]
        num_dropped = sum(run.num_dropped for _, run in found)
        return Turns(run_id, turns, num_dropped, (), ()) if turns else None

    async def recent_runs(request: Request) -> Response:
        read_query(request.query_params, ())
        groups = await groups_of(request)
        if isinstance(groups, Response):
            return groups
        rows = []
        num_joined = 0
        for group in groups[:MAX_RUNS]:
            row = _alone(group[0])
            if len(group) > 1 and num_joined < MAX_JOINED:
                num_joined += 1
                found = await whole(request, row.run_id, group)
                num_open = sum(part.row.num_open for part in group)
                if found is not None:
                    now_unix_ns = request.app.state.runtime.unix_ns()
                    row = row_of(row.run_id, found.turns, now_unix_ns, num_dropped=found.num_dropped, num_open=num_open)
            rows.append(row)
        return json_response(RunList(rows))

    async def recent_run(request: Request) -> Response:
        form = read_query(request.query_params, (FORM,))["form"]
        run_id = request.path_params["run_id"]
        groups = await groups_of(request)
        if isinstance(groups, Response):
            return groups
        for group in groups:
            if run_id in {part.row.run_id for part in group}:
                found = await whole(request, run_id, group)
                if found is not None:
                    num_open = sum(part.row.num_open for part in group)
                    now_unix_ns = request.app.state.runtime.unix_ns()
                    return await run_in_threadpool(run_response, found, now_unix_ns, form, num_open)
        raise missing(run_id)

    return [Route(path, recent_runs), Route(f"{path}/{{run_id}}", recent_run)]


def joined(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the parts of each run, the earliest first, and the run with the latest turn first. Requests that name no
    run, and that no other continues, are left out."""
    first_of: dict[str, int] = {}  # the index of the first part with each run id or digest
    leaders = list(range(len(parts)))  # parts with the same leader are of one run

    def leader(number: int) -> int:
        while leaders[number] != number:
            number = leaders[number]
        return number

    for number, part in enumerate(parts):
        for name in (part.row.run_id, *([] if part.row.is_named else part.row.digests or [])):
            leaders[leader(number)] = leader(first_of.setdefault(name, number))
    for number, part in enumerate(parts):
        for digest in [] if part.row.is_named else part.row.before or []:
            if digest in first_of:
                leaders[leader(number)] = leader(first_of[digest])
    groups: dict[int, list[Part]] = {}
    for number in sorted(range(len(parts)), key=lambda number: parts[number].row.started_unix_ns):
        groups.setdefault(leader(number), []).append(parts[number])
    runs = [group for group in groups.values() if group[0].row.is_named or sum(p.row.num_turns for p in group) > 1]
    return sorted(runs, key=lambda group: -max(part.row.started_unix_ns + part.row.duration_ns for part in group))


def _rows(answers: Mapping[int, bytes]) -> list[Part]:
    parts = []
    for replica, content in answers.items():
        with suppress(*_UNREADABLE):
            parts += [Part(replica, row) for row in msgspec.json.decode(content, type=RunList).runs]
    return parts


def _runs(answers: Mapping[int, bytes]) -> list[tuple[int, Run]]:
    runs = []
    for replica, content in answers.items():
        with suppress(*_UNREADABLE):
            runs.append((replica, msgspec.json.decode(content, type=Run)))
    return runs


def _at(replica: int, turn: KeptTurn) -> KeptTurn:
    turn.replica = replica
    return turn


def _alone(part: Part) -> RunRow:
    return msgspec.structs.replace(part.row, replicas=[part.replica], digests=UNSET, before=UNSET)
