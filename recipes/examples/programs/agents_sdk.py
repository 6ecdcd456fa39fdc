"""
The OpenAI Agents SDK (`pip install openai-agents`): a planner that hands the problem over to a coder.

    python recipes/train_magrpo.py --workflow recipes/examples/programs/agents_sdk.py:solve --agents planner coder \
        --max_calls 1 --model_name_or_path Qwen/Qwen2.5-Coder-0.5B-Instruct

A handoff is a call of a tool, so the model must know tools. If the planner does not hand over, its reply is the solution.
"""

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner


async def solve(problem, client):
    def agent(name, instructions, **options):
        model = OpenAIChatCompletionsModel(model=name, openai_client=client)
        return Agent(name=name, instructions=instructions, model=model, **options)

    coder = agent("coder", "Write the function. Code only.")
    planner = agent("planner", "Hand the problem over to the coder.", handoffs=[coder])
    result = await Runner.run(planner, problem["prompt"], run_config=RunConfig(tracing_disabled=True))
    return result.final_output
