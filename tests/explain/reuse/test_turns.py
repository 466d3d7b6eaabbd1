"""The place of a prompt in a run of an agent."""

from oaiserve.explain.reuse.outline import Outline, part_of
from oaiserve.explain.reuse.prefix_hashes import prefix_hashes
from oaiserve.explain.reuse.recent_prompts import ReadPrompt, RecentPrompts
from oaiserve.explain.reuse.turns import turn_of
from oaiserve.facts.turn import AgentRun, Turn, TurnPrompt

QUESTION, CALL, RESULT, ANSWER, THANKS = (
    part_of(content, role)
    for content, role in (
        (b"Which files?", "user"),
        (b"ls", "assistant"),
        (b"a.txt" * 20, "tool"),
        (b"One.", "assistant"),
        (b"Thanks", "user"),
    )
)
FIRST = Outline("model", tools=(part_of(b"list"),), system=(part_of(b"Be brief", "system"),), messages=(QUESTION,))


def with_messages(*messages: object, system: bytes = b"Be brief") -> Outline:
    return Outline("model", tools=FIRST.tools, system=(part_of(system, "system"),), messages=messages)  # type: ignore[arg-type]


def run_after(*outlines: Outline, client: str = "client", named: str = "") -> AgentRun:
    """Return the run of the last of these prompts, whose ids are their numbers."""
    recent = RecentPrompts(4, has_cache=True)
    for number, outline in enumerate(outlines):
        read = ReadPrompt(str(number), str(number), client, AgentRun(named), 0, 0, outline, prefix_hashes([number]), 0)
        recent.explain(read)
    return read.run


RUN = AgentRun("run")


def turn(outline: Outline, key_name: str = "", run: AgentRun = RUN) -> Turn:
    return turn_of(outline, run, key_name, is_named=True, written_tokens=7)


def prompt(outline: Outline) -> TurnPrompt:
    return turn(outline).prompt()


def test_a_prompt_that_continues_another_with_its_answer_is_of_the_same_run() -> None:
    second = with_messages(QUESTION, CALL, RESULT)
    assert run_after(FIRST, second).id == "0"
    assert run_after(FIRST, second, with_messages(QUESTION, CALL, RESULT, ANSWER, THANKS)).id == "0"
    assert run_after(FIRST, second, second).id == "0"  # sent again


def test_a_clock_in_the_system_message_does_not_split_a_run() -> None:
    assert run_after(FIRST, with_messages(QUESTION, CALL, RESULT, system=b"Be brief. It is 12:01")).id == "0"


def test_prompts_that_share_their_beginning_are_of_different_runs() -> None:
    assert run_after(FIRST, FIRST).id == "1"
    assert run_after(FIRST, with_messages(THANKS)).id == "1"
    assert run_after(FIRST, with_messages(QUESTION, THANKS)).id == "1"


def test_turns_of_a_long_run_belong_together() -> None:
    messages = [QUESTION]
    outlines = [with_messages(*messages)]
    for number in range(100):
        messages += [part_of(b"call %d" % number, "assistant"), part_of(b"result %d" % number, "tool")]
        outlines.append(with_messages(*messages))
    assert run_after(*outlines).id == "0"


def test_a_named_run_stays_as_it_is() -> None:
    assert run_after(FIRST, with_messages(QUESTION, CALL, RESULT), named="mine").id == "mine"


def test_a_subagent_of_a_subagent_is_of_the_same_run() -> None:
    recent = RecentPrompts(4, has_cache=True)
    runs = []
    for number, run in enumerate((("main", ""), ("main", "child"), ("child", "grandchild"), ("grandchild", "last"))):
        read = ReadPrompt(str(number), str(number), "client", AgentRun(*run), 0, 0, FIRST, prefix_hashes([1]), 0)
        recent.explain(read)
        runs.append(read.run)
    assert runs == [("main", ""), ("main", "child"), ("main", "grandchild"), ("main", "last")]
    read = ReadPrompt("other", "other", "other", AgentRun("child", "x"), 0, 0, FIRST, prefix_hashes([1]), 0)
    recent.explain(read)
    assert read.run == ("child", "x")


def test_a_turn_has_the_sizes_of_its_parts_by_role() -> None:
    sizes = prompt(with_messages(QUESTION, CALL, RESULT)).sizes
    assert sizes == {"tools": 4, "system": 8, "user": 12, "answers": 2, "tool_results": 100}


def test_tool_results_since_the_last_answer_tell_tools_from_users() -> None:
    assert prompt(with_messages(QUESTION, CALL, RESULT)).after_tools
    assert prompt(with_messages(QUESTION, CALL, RESULT, THANKS)).after_tools  # a reminder that the agent has added
    assert not prompt(FIRST).after_tools
    assert not prompt(with_messages(QUESTION, CALL, RESULT, ANSWER, THANKS)).after_tools


def test_the_digest_of_a_turn_is_among_those_before_the_next_one() -> None:
    first = prompt(FIRST)
    second = prompt(with_messages(QUESTION, CALL, RESULT))
    third = prompt(with_messages(QUESTION, CALL, RESULT, ANSWER, THANKS))
    assert second.before == (first.digest,)
    assert third.before == (first.digest, second.digest)


def test_ids_are_hashes_that_separate_keys() -> None:
    mine = turn(FIRST, "alice")
    assert mine.run != turn(FIRST, "bob").run
    assert mine.run.startswith("run_")
    assert (mine.agent, turn(FIRST, "alice", AgentRun("run", "explorer")).agent[:6]) == ("", "agent_")
