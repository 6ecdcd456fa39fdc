"""A team of other agents, as a user writes it down."""

import pytest

from marcog_trl.cli.agents_file import agent_settings


class TestAgentSettings:
    def read(self, tmp_path, text, num_agents=None):
        (tmp_path / "agents.yaml").write_text(text)
        return agent_settings(num_agents, tmp_path / "agents.yaml")

    def test_a_list_is_the_team_and_a_mapping_replaces_texts(self, tmp_path):
        roles = {"helper": "Help.", "main": "Do: it."}
        team = "- {name: helper, role: Help.}\n- name: main\n  role: 'Do: it.'\n"
        assert self.read(tmp_path, team) == self.read(tmp_path, team, 2) == {"num_agents": 2, "roles": roles}
        assert self.read(tmp_path, "helper: Help.\nmain: 'Do: it.'") == {"roles": roles}
        assert self.read(tmp_path, "helper: Help.", 4) == {"num_agents": 4, "roles": {"helper": "Help."}}
        assert agent_settings(3) == {"num_agents": 3} and agent_settings() == {}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"has no agents\. Write \[\{name: helper, role: Write aux\.\}, .* for example\."),
            ("helper", "has no agents"),
            ("[]", "has no agents"),
            ("[helper, main]", "has 'helper' at 0, but needs the keys name and role. Write"),
            ("- {name: helper}", r"has the keys \['name'\] at 0, but needs the keys name and role"),
            ("- {name: a, role: A.}\n- {name: b, role: B., model: c}", r"the keys \['name', 'role', 'model'\] at 1"),
            ("- {name: a, role: A.}\n- {name: a, role: B.}", "has 'a' 2 times. Rename one of them, such as to 'a2'."),
            ("helper: A.\nhelper: B.", "has 'helper' 2 times. Rename one of them, such as to 'helper2'."),
            ("- {name: a, name: b, role: A.}", "has 'name' 2 times"),
            ("helper: ''", "has role='' for agent 'helper', which must be a text"),
            ("helper: 3", "has role=3 for agent 'helper', which must be a text"),
            ("3: Help.", "has name=3 for agent 3, which must be a text"),
            ("helper: {role: Help.}", r"has role=\{'role': 'Help\.'\} for agent 'helper', which must be a text"),
            ("helper: [", "cannot be read: while parsing"),
        ],
    )
    def test_what_is_no_team_is_refused(self, tmp_path, text, message):
        with pytest.raises(ValueError, match=rf"^agents='.*agents\.yaml' (has )?{message}"):
            self.read(tmp_path, text)

    def test_the_number_must_agree_and_the_file_exist(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"lists 1 agents, but num_agents=3\. Set num_agents=1, or write a mapping"
        ):
            self.read(tmp_path, "- {name: a, role: A.}", 3)
        with pytest.raises(ValueError, match=r"agents='.*/none\.yaml' cannot be read: .*No such file"):
            agent_settings(agents=tmp_path / "none.yaml")
