"""A local OpenAI-compatible endpoint that answers from a script."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


KEY = "sk-secret-0123456789"


def completion(content, finish_reason="stop", **usage):
    """The body of an answer; `usage` has `prompt_tokens` and `completion_tokens`, if the server counts them."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]} | ({"usage": usage} if usage else {}))


class ChatServer:
    """
    A local `/v1/chat/completions`. `answer(text, attempt)` is called with the question's text and which request with this
    text it is, from 0. It returns a status, a body and headers, or None to hang up without an answer.
    """

    def __init__(self):
        self.requests = []
        self.seen = []
        self.answer = lambda text, attempt: (200, completion(f"edit {text}"), {})
        self.lock = threading.Lock()
        self.port = 0

    def start(self):
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = body["messages"][-1]["content"]
                with endpoint.lock:
                    attempt = endpoint.seen.count(text)
                    endpoint.seen.append(text)
                    endpoint.requests.append((self.path, self.headers, body))
                answer = endpoint.answer(text, attempt)
                if answer is None:
                    return
                status, content, headers = answer
                try:
                    self.send_response(status)
                    for name, value in {"Content-Type": "application/json", **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content.encode())
                except (BrokenPipeError, ConnectionResetError):  # the client did not wait
                    pass

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def endpoint():
    endpoint = ChatServer()
    endpoint.start()
    yield endpoint
    endpoint.stop()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A key, no proxies, and short waits before retries."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
