"""
Planner and coder with the package openai, without async: one after the other.

    python recipes/train_magrpo.py --workflow recipes/examples/programs/openai_sync.py:solve --agents planner coder --max_calls 1
"""


def solve(problem, client):
    def ask(agent, text):
        response = client.chat.completions.create(model=agent, messages=[{"role": "user", "content": text}])
        return response.choices[0].message.content

    plan = ask("planner", f"{problem['prompt']}\n\nWrite a plan in a few short steps. No code.")
    return ask("coder", f"{problem['prompt']}\n\nA plan:\n{plan}\n\nWrite the function. Code only.")
