"""A session of openai-agents on one WebSocket: a first agent hands over to one that has tools."""

import asyncio

from agents import Agent, function_tool, responses_websocket_session, set_tracing_disabled
from openai import OpenAI
from session_tools import BASE_URL, TASK, edit_file, run_command

set_tracing_disabled(True)


async def main() -> None:
    """Run the session with the server's first model."""
    model = OpenAI(base_url=BASE_URL, api_key="none").models.list().data[0].id
    tools = [function_tool(run_command), function_tool(edit_file)]
    coder = Agent(name="coder", model=model, tools=tools, instructions="You write code.")
    instructions = "Hand over to coder, who has run_command and edit_file."
    first = Agent(name="first", model=model, handoffs=[coder], instructions=instructions)
    async with responses_websocket_session(base_url=BASE_URL, api_key="none") as session:
        print((await session.run(first, TASK, max_turns=20)).final_output)


asyncio.run(main())
