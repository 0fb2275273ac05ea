"""Which of SGLang's models a server does not import."""

from pathlib import Path

import pytest

from rljob_runtime.engine.sglang.models import DISABLED, OWN_PACKAGE, unused_models

FILES = {
    "plain": "class PlainForCausalLM:\n    pass\n\n\nEntryClass = PlainForCausalLM\n",
    "family": "from .plain import PlainForCausalLM\n\nEntryClass = [\n    FirstForCausalLM,\n    SecondForCausalLM,\n]\n",
    "rough": "EntryClass = QuantPlainForCausalLM\n",
    "seen": "from sglang.srt.models.registry import ModelRegistry\n\nEntryClass = SeenForConditionalGeneration\n",
    "derived": "from sglang.srt.models.between import Between\n\nEntryClass = DerivedForConditionalGeneration\n",
    "between": "from .seen import SeenForConditionalGeneration\n",
    "parts": "class FirstForCausalLMHead:\n    pass\n",
    "__init__": "",
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Interpreter of an environment with a few models."""
    folder = tmp_path / "lib" / "python3.11" / "site-packages" / "sglang" / "srt" / "models"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    return tmp_path / "bin" / "python"


@pytest.mark.parametrize(
    ("architecture", "unused"),
    [
        ("SecondForCausalLM", "between,derived,parts,plain,rough,seen"),
        ("PlainForCausalLM", "between,derived,family,parts,seen"),  # where its weights are quantized SGLang takes the other one
    ],
)
def test_all_but_what_registers_the_models_class_are_left_out(python: Path, architecture: str, unused: str) -> None:
    assert unused_models(python, [architecture], {"watchdog_timeout": 9}) == {DISABLED: unused}


@pytest.mark.parametrize(
    ("architectures", "extra_args"),
    [
        ([], {}),
        (["OtherForCausalLM"], {}),  # SGLang falls back to transformers
        (["SecondForCausalLM", "OtherForCausalLM"], {}),
        (["SeenForConditionalGeneration"], {}),
        (["DerivedForConditionalGeneration"], {}),
        (["SecondForCausalLM"], {"speculative_algorithm": "EAGLE"}),
        (["SecondForCausalLM"], {"model_impl": "transformers"}),
        (["SecondForCausalLM"], {"json_model_override_args": '{"architectures": ["PlainForCausalLM"]}'}),
    ],
)
def test_all_are_imported_where_others_may_be_needed(python: Path, architectures: list[str], extra_args: dict[str, str]) -> None:
    assert unused_models(python, architectures, extra_args) == {}


def test_what_somebody_has_chosen_stays(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLED, "parts")
    assert unused_models(python, ["SecondForCausalLM"], {}) == {}


def test_a_package_of_the_users_models_is_imported_as_a_whole(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN_PACKAGE, "my_models")
    assert unused_models(python, ["SecondForCausalLM"], {}) == {}


def test_an_environment_that_is_laid_out_otherwise_imports_all(tmp_path: Path) -> None:
    assert unused_models(tmp_path / "bin" / "python", ["PlainForCausalLM"], {}) == {}
