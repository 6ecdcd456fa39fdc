"""A team goes to the Hub whole: against a local server that speaks the part of the Hub's protocol that a push needs."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import teams
import torch
from safetensors import safe_open

from marcog_trl.trainers.saved import load_trainer


SCRIPT = """
import sys
import teams
from marcog_trl import SHPPOTrainer

model, path, ends_with_push = sys.argv[1:]
options = {"push_to_hub": True, "hub_model_id": "someone/team"}
if ends_with_push == "False":
    options |= {"save_strategy": "steps", "save_steps": 1, "hub_strategy": "every_save", "max_steps": 2}
data = teams.dataset(4, test=[["assert f"]] * 4, test_format=["asserts"] * 4, entry_point=["f"] * 4)
trainer = teams.make(
    model, path, SHPPOTrainer, workflow="collaboration", data=data, reward="execution_reward", isolation="best_effort",
    num_workers=1, **options,
)
trainer.train()
if ends_with_push == "True":
    trainer.push_to_hub(dataset_name="builtin")
"""


TESTED = teams.dataset(2, test=[["assert f"]] * 2, test_format=["asserts"] * 2, entry_point=["f"] * 2)


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory: creation, the question how to upload, and commits with the files inside."""

    def do_GET(self):
        if self.path.startswith("/api/models/someone/team"):
            self.answer({"id": "someone/team", "sha": "0" * 40, "siblings": [], "tags": []})
        else:
            self.answer({"error": f"nothing at {self.path}"}, 404)

    def do_HEAD(self):
        self.answer({}, 404)

    def do_POST(self):
        body = self.body()
        server = self.server
        if self.path == "/api/repos/create":
            server.created.append(json.loads(body))
            self.answer({"url": f"{server.url}/someone/team", "id": "someone/team", "name": "someone/team"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer(
                {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]}
            )
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    value = operation["value"]
                    server.files[value["path"]] = base64.b64decode(value["content"])
            server.commits += 1
            oid = "0" * 40
            self.answer({"commitUrl": f"{server.url}/someone/team/commit/{oid}", "commitOid": oid, "hookOutput": ""})
        else:
            self.answer({"error": f"nothing at {self.path}"}, 404)

    def body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.files, server.created, server.commits = {}, [], 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("ends_with_push", [True, False], ids=["push_to_hub", "every_save"])
def test_a_pushed_team_is_whole(hub, tiny_model, tmp_path, ends_with_push):
    folder = tmp_path / "run"
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_nobody",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, "-c", SCRIPT, tiny_model, str(folder), str(ends_with_push)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert hub.created and hub.created[0]["name"] == "team"
    expected = {
        "adapter_config.json",
        "adapter_model.safetensors",
        "team.json",
        "team_modules.safetensors",
        "README.md",
    }
    assert expected | {"tokenizer.json"} <= set(hub.files)
    assert hub.commits >= (1 if ends_with_push else 2)

    pulled = tmp_path / "pulled"
    for name, content in hub.files.items():
        (pulled / name).parent.mkdir(parents=True, exist_ok=True)
        (pulled / name).write_bytes(content)
    card = (pulled / "README.md").read_text()
    assert "shppo" in card and "2404.03869" in card
    assert "safetensors" not in card.partition("---")[0]
    loaded = load_trainer(pulled, TESTED)
    loaded.executor.close()
    assert loaded.agents == ["helper", "main"]
    with safe_open(pulled / "team_modules.safetensors", "pt") as modules:
        for name, tensor in loaded.team.state_dict().items():
            assert torch.equal(modules.get_tensor(name), tensor), name
        assert any(name.startswith("latent_net") for name in modules.keys())
