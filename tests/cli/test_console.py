"""What commands say of warnings: each once, in one line."""

import io
import warnings

import pytest

from marcog_trl.cli.console import _PACKAGE, warnings_once


def warn(text, category=UserWarning, filename="/site-packages/library/file.py"):
    warnings.showwarning(text, category, filename, 7)


class TestWarnings:
    @pytest.fixture(autouse=True)
    def shown(self):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            yield

    def test_each_is_shown_once_whatever_resets_pythons_own_record(self, capsys):
        before = warnings.showwarning
        with warnings_once():
            for _ in range(3):
                with warnings.catch_warnings():
                    warnings.simplefilter("always")
                    warnings.warn("old\nname", FutureWarning, stacklevel=1)
                warn("ours")
            warn("ours", FutureWarning)
        assert warnings.showwarning is before
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("warning: old name (FutureWarning in ") and "test_console.py:" in lines[0]
        assert lines[1] == "warning: ours" and lines[2].startswith("warning: ours (FutureWarning in ")
        assert len(lines) == 3

    def test_old_names_that_libraries_use_are_not_shown(self, tiny_model, capsys):
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        with warnings.catch_warnings(), warnings_once():
            warnings.simplefilter("always")
            get_peft_model(model, LoraConfig(target_modules="all-linear"))
            assert model.is_gradient_checkpointing is False  # which warns, as PEFT does
            model.gradient_checkpointing_enable()  # as TRL does
        assert "gradient_checkpointing" not in capsys.readouterr().err

    def test_a_file_may_be_given(self, capsys):
        file = io.StringIO()
        with warnings_once():
            warnings.showwarning("text", UserWarning, "file.py", 1, file)
        assert file.getvalue() == "warning: text\n" and capsys.readouterr().err == ""

    @pytest.mark.parametrize(("rank", "number"), [("0", 2), ("1", 1)])
    def test_other_processes_show_only_ours(self, capsys, monkeypatch, rank, number):
        monkeypatch.setenv("RANK", rank)
        with warnings_once():
            warn("of a library", FutureWarning)
            warn("a reward function failed on process 1", filename=f"{_PACKAGE}/rewards/scoring.py")
        printed = capsys.readouterr().err
        assert printed.count("warning: ") == number and "failed on process 1" in printed
