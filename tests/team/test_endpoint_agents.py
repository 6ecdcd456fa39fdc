"""Teams with agents behind endpoints, outside of training: saved, loaded, measured and exported."""

import json
from dataclasses import replace

import pytest
import teams
from chat_server import KEY, completion
from chat_server import endpoint as endpoint  # a fixture
from chat_server import environment as environment  # a fixture
from datasets import Dataset

from marcog_trl import Endpoint, MultiAgentGRPOTrainer, SHPPOTrainer, Team, evaluate_team, make_workflow
from marcog_trl.evaluation.baselines import single_agent, untrained_team
from marcog_trl.preferences import collect_preferences
from marcog_trl.team.endpoint_agents import use_endpoints
from marcog_trl.team.settings import TeamSettings


PROBLEM = {"prompt": "Write f.", "entry_point": "f", "test": ["assert f(1) == 2"], "test_format": "asserts"}
CODE = "def f(x):\n    return x + 1"


def save(model, path, endpoint, trainer=MultiAgentGRPOTrainer, **options):
    """A saved team of a planner behind the endpoint and a coder, and its trainer."""
    endpoint.answer = lambda text, attempt: (200, completion(CODE, prompt_tokens=20, completion_tokens=9), {})
    trainer = teams.make(
        model, path, trainer, "execution_reward", workflow="pipeline", num_agents=2, data=Dataset.from_list([PROBLEM] * 2),
        endpoints={"planner": {"model": "big", "base_url": endpoint.url}}, isolation="best_effort", num_workers=1, **options,
    )  # fmt: skip
    trainer.save_model()
    return trainer


@pytest.fixture
def saved(tiny_model, tmp_path, endpoint):
    save(tiny_model, tmp_path / "team", endpoint)
    return tmp_path / "team"


def test_team_json_has_the_endpoint_and_no_secret(saved, endpoint):
    content = json.loads((saved / "team.json").read_text())
    assert content["settings"]["endpoints"]["planner"]["model"] == "big"
    assert content["settings"]["endpoints"]["planner"]["base_url"] == endpoint.url
    assert content["settings"]["endpoints"]["planner"]["api_key_env"] == "OPENAI_API_KEY"
    assert all(KEY.encode() not in path.read_bytes() for path in saved.rglob("*") if path.is_file())


def test_a_loaded_team_asks_its_endpoint(saved, endpoint):
    team = Team.from_pretrained(saved, isolation="best_effort", num_workers=1)
    assert (team.outside, team.own_agents) == (["planner"], ["coder"])
    first, second = team.solve(PROBLEM).messages
    assert first["reply"] == CODE and CODE in second["prompt"][0]["content"]
    assert len(endpoint.seen) == 1
    with pytest.raises(ValueError, match=r"agent='planner' speaks through an endpoint. Use one of \['coder'\]"):
        with team.use_agent("planner"):
            pass
    with pytest.raises(ValueError, match=r"Agents \['planner'\] speak through endpoints, but preferences need"):
        collect_preferences(team, Dataset.from_list([PROBLEM]))
    team.close()


def test_the_endpoint_can_be_moved_or_left_out(saved, endpoint):
    endpoint.seen.clear()
    moved = {"planner": {"model": "small", "base_url": endpoint.url.replace("127.0.0.1", "localhost")}}
    team = Team.from_pretrained(saved, endpoints=moved)
    team.play([PROBLEM])
    assert [body["model"] for _, _, body in endpoint.requests] == ["small"]
    team = Team.from_pretrained(saved, endpoints={})
    assert team.outside == []
    team.play([PROBLEM])
    assert len(endpoint.requests) == 1
    # A team of the coder alone has no planner
    assert Team.from_pretrained(saved, num_agents=1).outside == []
    assert single_agent(saved).outside == []
    # Also where the workflow declares it
    workflow = make_workflow("pipeline", num_agents=2)
    workflow.agents = tuple(replace(agent, endpoint=Endpoint("big", endpoint.url)) for agent in workflow.agents)
    assert use_endpoints(workflow, {}) == {}
    assert [agent.endpoint for agent in workflow.agents] == [None, None]


def test_the_key_is_asked_for_before_the_model_is_loaded(saved, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ValueError, match=r"The endpoint of agent 'planner' cannot be used: .*OPENAI_API_KEY"):
        Team.from_pretrained(saved, base_model="no/model")
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    with pytest.raises(ValueError, match=r"cannot be used: Endpoints need the package openai. Run `pip install"):
        Team.from_pretrained(saved, base_model="no/model")


def test_a_team_of_endpoints_is_measured_without_its_model(tiny_model, endpoint):
    endpoint.answer = lambda text, attempt: (200, completion(CODE, prompt_tokens=20, completion_tokens=9), {})
    there = {"model": "big", "base_url": endpoint.url}
    settings = TeamSettings(
        workflow="pipeline", num_agents=2, endpoints={"planner": there, "coder": there}, isolation="best_effort", num_workers=1
    )  # fmt: skip
    team = untrained_team(tiny_model, settings)
    team.generate = None  # never called
    figures = evaluate_team(team, Dataset.from_list([PROBLEM]), num_samples=2)
    assert (figures["solved"], figures["solved_greedy"], figures["infrastructure"]) == (1, 1, 0)
    # At temperature 0, the greedy episode and both samples share one request per agent
    assert len(endpoint.seen) == 2
    assert (figures["agents/coder/tokens"], figures["agents/coder/truncated"]) == (9, 0)
    assert figures["tokens_per_problem"] == 2 * 2 * 9
    team.close()


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (MultiAgentGRPOTrainer, {}),
        (SHPPOTrainer, {"latent_scope": "agent"}),
        (SHPPOTrainer, {"latent_scope": "observation"}),
        (SHPPOTrainer, {"parameter_sharing": "separate"}),
    ],
    ids=str,
)
def test_exports_have_no_adapter_for_it(tiny_model, tmp_path, endpoint, trainer, options):
    trainer = save(tiny_model, tmp_path / "team", endpoint, trainer, **options)
    report = trainer.export_agents(tmp_path / "agents")
    assert list(report) == ["coder"]
    assert sorted(path.name for path in (tmp_path / "agents").iterdir()) == ["coder", "export.json"]
    assert json.loads((tmp_path / "agents" / "export.json").read_text())["endpoints"] == ["planner"]
    trainer.create_model_card("team")
    assert "`planner` is `big` behind an endpoint" in (tmp_path / "team" / "README.md").read_text()
    assert Team.from_pretrained(tmp_path / "team").outside == ["planner"]
