"""An expert between turns, in training: asked over HTTP, and missed without stopping the run."""

import json
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import teams

from marcog_trl import MultiAgentGRPOTrainer


class Endpoint(ThreadingHTTPServer):
    """Suggests the same edit for everything, and dies after some answers."""

    def __init__(self, answers):
        self.left = answers
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.left -= 1
            dead = self.server.left < 0
        body = json.dumps(
            {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Name it."}}]}
        ).encode()
        self.send_response(503 if dead else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def columns():
    return {"test": [["assert f"]] * 2, "test_format": ["asserts"] * 2, "entry_point": ["f"] * 2}


@pytest.mark.parametrize("turn_tree", [False, True])
def test_a_server_that_dies_costs_its_feedback_only(tiny_model, tmp_path, monkeypatch, columns, turn_tree):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    # One problem, two episodes, two agents: four questions a step, whether nodes branch afterwards or not
    server = Endpoint(answers=4)
    trainer = teams.make(
        tiny_model, tmp_path, MultiAgentGRPOTrainer, workflow="collaboration", num_turns=2, feedback="expert_edits",
        expert_model="any", expert_base_url=server.url, data=teams.dataset(2, **columns), max_steps=3,
        per_device_train_batch_size=12 if turn_tree else 8, isolation="best_effort", num_workers=1, turn_tree=turn_tree,
    )  # fmt: skip
    calls = teams.script(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    server.shutdown()
    trainer.executor.close()
    assert teams.logged(trainer, "feedback/failed") == [0.0, 1.0, 1.0]
    told = [[trainer._tokenizer.decode(prompt) for prompt in prompts] for prompts, _ in calls]
    assert len(told) == 6
    assert all("Name it.\nRevise your answer. Answer with one Python code block." in prompt for prompt in told[1])
    for later in (told[3], told[5]):
        assert all(
            "Revise your answer. Answer with one Python code block." in prompt and "Name it." not in prompt
            for prompt in later
        )
    assert len([w for w in caught if server.url in str(w.message)]) == 1
