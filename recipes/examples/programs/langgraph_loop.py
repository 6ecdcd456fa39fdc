"""
LangGraph (`pip install langgraph langchain-openai`): planner -> coder -> tester, and back to the coder if the tester objects.

    python recipes/train_magrpo.py --workflow recipes/examples/programs/langgraph_loop.py:solve --agents planner coder tester \
        --max_calls 2
"""

from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    problem: str
    planner: str
    coder: str
    tester: str
    tries: int


async def solve(problem, client):
    def node(agent, task):
        model = ChatOpenAI(model=agent, base_url=str(client.base_url), api_key=client.api_key)

        async def speak(state):
            said = [f"{name}:\n{state[name]}" for name in ("planner", "coder", "tester") if name in state]
            reply = await model.ainvoke("\n\n".join([state["problem"], *said, task]))
            return {agent: reply.content, "tries": state.get("tries", 0) + (agent == "coder")}

        return speak

    graph = StateGraph(State)
    graph.add_node("plan", node("planner", "Write a plan in a few short steps. No code."))
    graph.add_node("code", node("coder", "Write the function. Code only."))
    graph.add_node("test", node("tester", "Is the code right? Answer YES, or say what is wrong."))
    graph.add_edge(START, "plan").add_edge("plan", "code").add_edge("code", "test")
    graph.add_conditional_edges("test", lambda s: END if "YES" in s["tester"] or s["tries"] > 1 else "code")
    return (await graph.compile().ainvoke({"problem": problem["prompt"]}))["coder"]
