"""A session of LangGraph: an agent of LangChain's, which is a graph of it."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from session_tools import BASE_URL, TASK, edit_file, run_command

model = ChatOpenAI(model="demo", base_url=BASE_URL, api_key="none")
agent = create_agent(model, tools=[run_command, edit_file])
result = agent.invoke({"messages": [{"role": "user", "content": TASK}]}, {"recursion_limit": 60})
print(result["messages"][-1].content)
