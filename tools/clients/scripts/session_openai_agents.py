"""A session of openai-agents: a first agent hands over to one that has tools."""

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from session_tools import BASE_URL, TASK, edit_file, run_command

model = OpenAIResponsesModel(model="demo", openai_client=AsyncOpenAI(base_url=BASE_URL, api_key="none"))
set_tracing_disabled(True)
tools = [function_tool(run_command), function_tool(edit_file)]
coder = Agent(name="coder", model=model, tools=tools, instructions="You write code.")
first = Agent(
    name="first", model=model, handoffs=[coder], instructions="Hand over to coder, who has run_command and edit_file."
)
print(Runner.run_sync(first, TASK, max_turns=20).final_output)
