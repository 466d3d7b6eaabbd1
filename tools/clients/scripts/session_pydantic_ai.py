"""A session of pydantic-ai: an agent with tools, whose answer has a type."""

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from session_tools import BASE_URL, TASK, edit_file, run_command


class Outcome(BaseModel):
    passes: bool
    summary: str


model = OpenAIResponsesModel("demo", provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))
outcome = Agent(model, tools=[run_command, edit_file], output_type=Outcome).run_sync(TASK).output
assert outcome.passes
print(outcome.summary)
