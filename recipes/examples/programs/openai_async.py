"""
Helper and main with the package openai: two agents that write at the same moment.

    python recipes/train_magrpo.py --workflow recipes/examples/programs/openai_async.py:solve --agents helper main --max_calls 1

These are the texts that the embedded default model knows.
"""

import asyncio


HELPER = (
    "Write only a Python function named aux that returns useful data for the problem below. Another agent writes the "
    "solution. Code only."
)
MAIN = (
    "Write the Python function asked for below. You may call aux(...), which another agent writes. Do not define aux. "
    "Code only."
)


async def solve(problem, client):
    async def ask(agent, role):
        content = f"{role}\n\n{problem['prompt']}"
        response = await client.chat.completions.create(model=agent, messages=[{"role": "user", "content": content}])
        return response.choices[0].message.content

    return "\n\n".join(await asyncio.gather(ask("helper", HELPER), ask("main", MAIN)))
