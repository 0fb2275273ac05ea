import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from rljob_api.errors import SpecInvalidError
from rljob_api.validation import check
from rljob_runtime.commands import model, show_plan
from rljob_runtime.commands.cli import app
from rljob_runtime.errors import ModelError
from rljob_runtime.tiny import TinySize, TinySummary
from tests.support import invalid_manifests
from tests.unit.api.manifests import manifest

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifests name models/tiny: what is printed must not depend on whether somebody made it."""
    monkeypatch.chdir(tmp_path)


def rljob(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_validate_says_ok_in_one_line() -> None:
    result = rljob("validate", QUICKSTART)
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    assert result.stdout.startswith("OK quickstart: 1 node, 2 devices, Disaggregated; actor_train 1, actor_infer 1, reward 1; ")


def test_validate_names_the_models_that_it_could_not_look_at(tmp_path: Path) -> None:
    document = manifest()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text('{"model_type": "qwen3"}')
    document["spec"]["model"]["path"] = "here"
    assert rljob("validate", "-", stdin=json.dumps(document)).stderr == ""
    document["spec"]["model"]["path"] = "models/tinny"
    document["spec"]["components"].append({"name": "teacher", "role": "Teacher", "placement": {"ranks": "0"}, "model": {"path": "/absent"}})
    result = rljob("validate", "-", stdin=json.dumps(document))
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    assert result.stderr.startswith("not checked: models/tinny, /absent: no config.json in a folder")


def test_validate_refuses_what_the_installed_reasoning_gym_lacks() -> None:
    misspelled = Path(QUICKSTART).read_text().replace("task: basic_arithmetic", "task: basic_aritmetic")
    result = rljob("validate", "-", stdin=misspelled)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("standard input is not valid, 1 problem:\n  spec.data.train[0].reasoningGym: ")
    assert "did you mean basic_arithmetic" in result.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert check(path.read_text()).plan.components
    assert rljob("plan", str(path)).exit_code == 0


def test_there_are_examples() -> None:
    assert {"quickstart.yaml", "qwen2.5-0.5b-gsm8k-style.yaml"} <= {path.name for path in EXAMPLES}


def test_validate_lists_every_problem_with_its_line(tmp_path: Path) -> None:
    document = manifest()
    document["spec"]["training"] = {"miniBatches": 5, "warmupSteps": 101}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    result = rljob("validate", str(file))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"{file} is not valid, 2 problems:\n  line ")
    assert "spec.training.warmupSteps: 101: is more than" in result.stderr


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        pytest.param(
            {"seed": "one"}, "checks (of fields against each other, placement, memory) are made once this problem is fixed", id="type"
        ),
        pytest.param({"seed": "one", "suspend": 1}, "memory) are made once these problems are fixed", id="types"),
        pytest.param(
            {"ranks": "7"}, "checks (of settings against the placement, memory) are made once the placement is possible", id="place"
        ),
        pytest.param({"training": {"miniBatches": 5}}, None, id="rule"),
        pytest.param({"sead": 1}, None, id="key"),
    ],
)
def test_checks_that_had_to_wait_are_counted_in_the_last_line(changes: dict[str, object], last: str | None, tmp_path: Path) -> None:
    document = manifest()
    if ranks := changes.pop("ranks", None):
        document["spec"]["components"][0]["placement"]["ranks"] = ranks
    document["spec"].update(changes)
    stderr = rljob("validate", "-", stdin=json.dumps(document)).stderr
    with pytest.raises(SpecInvalidError) as caught:
        check(document)
    assert str(caught.value).splitlines()[-1] == (caught.value.unchecked or str(caught.value.errors[-1]))
    if last is None:
        assert "more checks" not in stderr
        return
    number, _, words = stderr.splitlines()[-1].partition(" more ")
    assert words.endswith(last)
    assert int(number) > 5
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    (tmp_path / "sweep.yaml").write_text("job: job.yaml\nmatrix: {spec.training.steps: [1, 2]}\n")
    assert rljob("sweep", str(tmp_path / "sweep.yaml")).stderr.splitlines()[-1].partition(" more ")[2] == words


def test_standard_input() -> None:
    assert rljob("validate", "-", stdin=json.dumps(manifest())).stdout.startswith("OK case: ")
    assert rljob("validate", "-", stdin="[").stderr.startswith("standard input is not valid, 1 problem:")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("validate", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("plan", "."), ".: is a folder, a file is needed; give the path of a job file"),
        (("explain", "spec.rolout"), "did you mean spec.rollout?"),
        (("explain", "spec.rolout.promptsPerStep"), "did you mean spec.rollout.promptsPerStep?"),
        (("explain", "spec.rolout.nothing"), "did you mean spec.rollout?"),
        (("explain", "spec.nodeGroups[0].nods"), "no field is called spec.nodeGroups[0].nods; did you mean spec.nodeGroups[].nodes?"),
        (("explain", "spec.components[0].engine.memory_fraction"), "did you mean spec.components[].engine.memoryFraction?"),
        (("explain", "spec.training.clipLow"), "did you mean spec.algorithm.policyLoss.clipLow?"),
        (("explain", "spec.validation.frequency"), "spec.validation has everySteps, atStart"),
        (("explain", "spec.rewards[1].parameters.digits"), "spec.rewards[].parameters is a free-form map"),
        (("explain", "spec.seed.first"), "spec.seed has no fields below it: integer"),
        (("explain", "specs"), "did you mean spec?"),
        (("explain", "Spec.training.steps"), "did you mean spec.training.steps?"),
        (("explain", "trainig"), "did you mean spec.training?"),
        (("explain", "xyzzy"), "start with rljob explain spec"),
        (("convert", "--from", "roll", QUICKSTART, "--name", "Math_GRPO"), "--name Math_GRPO: is not the name of a job; use lower-case"),
        (("convert", "--from", "roll", QUICKSTART, "--name", "a" * 44), "has 44 characters, at most 43 are allowed"),
        (("convert", "--from", "rlinf", "nowhere"), "nowhere: no such file; give the path of an RLinf configuration"),
        (("conformance", "--jsonl", "nowhere"), "nowhere: no such file; give the path of a JSONL file of cases"),
        (("sweep", "nowhere.yaml"), "nowhere.yaml: no such file; give the path of a sweep"),
        (("sweep", "."), ".: is a folder, a file is needed; give the path of a sweep"),
        (("run", QUICKSTART, "--overwrite", "--resume"), "contradict"),
        (("run", "nowhere.yaml"), "no such file"),
        (("plan", QUICKSTART, "--output", "xml"), "xml"),
        (("frobnicate",), "No such command"),
    ],
)
def test_wrong_arguments_exit_2_and_say_why(arguments: tuple[str, ...], message: str) -> None:
    result = rljob(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Errno" not in result.stderr


def test_explain_takes_paths_as_people_write_them() -> None:
    for written, path in (
        ("spec.nodeGroups[0].nodes", "spec.nodeGroups[].nodes"),
        ("spec.nodeGroups[].nodes", "spec.nodeGroups[].nodes"),
        ("spec.components[actor_train].role", "spec.components[].role"),
        ("rollout.promptsPerStep", "spec.rollout.promptsPerStep"),
        ("spec.rollout.", "spec.rollout"),
    ):
        assert rljob("explain", written).stdout.startswith(f"{path}  ("), written


def test_a_sweep_whose_job_cannot_be_read_says_who_names_it(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("job: absent.yaml\nmatrix: {spec.seed: [0, 1]}\n")
    missing = rljob("sweep", str(sweep))
    assert (missing.exit_code, missing.stderr.startswith(f"{tmp_path}/absent.yaml: no such file; `job` of {sweep} names it; ")) == (2, True)
    (tmp_path / "absent.yaml").write_bytes(b"\xff")
    assert "absent.yaml: is not UTF-8 text (byte 0); save it as UTF-8" in rljob("sweep", str(sweep)).stderr


def test_a_run_without_its_job_is_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / ".rljob-run").touch()
    result = rljob("describe", str(tmp_path))
    assert (result.exit_code, f"{tmp_path}/spec.yaml: no such file; " in result.stderr) == (2, True)


def test_a_model_that_cannot_be_written_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*_: object, **__: object) -> TinySummary:
        raise PermissionError(13, "Permission denied", "/nope/.x.tmp")

    monkeypatch.setattr(model, "make_tiny_model", refused)
    assert model.make_with_progress(Path("/nope/x"), size="fresh", seed=0) == 3
    assert capsys.readouterr().err.strip() == "/nope/x: cannot be made: Permission denied; name a folder where this user may write"


def test_an_invalid_manifest_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(invalid_manifests.named("role-no-trainer").manifest())
    result = rljob("run", str(file))
    assert result.exit_code == 2
    assert "spec.components: has no Trainer" in result.stderr


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    result = rljob("validate", str(file))
    assert (result.exit_code, "not UTF-8" in result.stderr) == (2, True)


def test_plan_for_tools() -> None:
    as_json, as_yaml = rljob("plan", QUICKSTART, "-o", "json").stdout, rljob("plan", QUICKSTART, "-o", "yaml").stdout
    document = json.loads(as_json)
    assert document == yaml.load(as_yaml, yaml.CSafeLoader)
    assert [(c["name"], c["worldSize"], c["devices"]) for c in document["components"]] == [
        ("actor_train", 1, [0]),
        ("actor_infer", 1, [1]),
        ("reward", 1, []),
    ]
    assert document["mode"] == "Disaggregated"


def test_plan_for_people() -> None:
    text = rljob("plan", QUICKSTART).stdout
    for word in (
        "node 0",
        "  actor_infer      [0]",
        "Components",
        "Weight sync",
        "Processes",
        "actor_infer-0",
        "0 (local[0])",
        "Disaggregated",
    ):
        assert word in text
    assert "\x1b" not in text


def test_plan_lists_processes_of_a_larger_job_only_when_asked() -> None:
    job = str(ROOT / "examples" / "qwen2.5-0.5b-gsm8k-style.yaml")
    assert "reward-3" not in rljob("plan", job).stdout
    assert "reward-3" in rljob("plan", job, "--processes").stdout


def test_plan_shows_what_a_run_would_refuse_yet(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "n_routed_experts": 8}))
    manifest = yaml.load(Path(QUICKSTART).read_text(), yaml.CSafeLoader)
    manifest["spec"]["model"] = {"path": str(tmp_path)}
    for component in manifest["spec"]["components"][:2]:
        component["placement"] = {"ranks": "0-1"}
    text = yaml.safe_dump(manifest)
    result = rljob("plan", "-", stdin=text)
    assert (result.exit_code, rljob("validate", "-", stdin=text).exit_code) == (0, 2)
    assert "Collocated" in result.stdout
    assert "A run would refuse this job:\n  spec.model.path" in result.stderr


def test_plan_as_pictures(tmp_path: Path) -> None:
    svg, html = tmp_path / "plan.svg", tmp_path / "plan.html"
    result = rljob("plan", QUICKSTART, "-o", "json", "--svg", str(svg), "--html", str(html))
    assert json.loads(result.stdout)["name"] == "quickstart"
    assert result.stderr == f"wrote {svg}\nwrote {html}\n"
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert svg.read_text().strip() in html.read_text()
    assert "<th>runs on</th>" in html.read_text()


def test_plan_says_when_a_picture_cannot_be_written(tmp_path: Path) -> None:
    result = rljob("plan", QUICKSTART, "--svg", str(tmp_path / "nowhere" / "plan.svg"))
    assert result.exit_code == 2
    assert "plan.svg: cannot be written: No such file or directory; name a file" in result.stderr


@pytest.mark.parametrize(("no_color", "has_color"), [(False, True), (True, False)])
def test_plan_in_a_terminal(no_color: bool, has_color: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="truecolor", width=80, no_color=no_color, _environ={})
    show_plan.print_picture(check(Path(QUICKSTART).read_text()), console)
    assert ("48;2;0;114;178m" in screen.getvalue()) is has_color
    assert ("48;" in screen.getvalue()) is has_color


def test_plan_on_a_terminal_without_unicode() -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show_plan.print_picture(check(Path(QUICKSTART).read_text()), Console(file=screen, width=80))
    screen.flush()
    assert b"1 node x 2 devices (cpu)" in screen.buffer.getvalue()


def test_weights_that_cannot_travel_are_a_problem() -> None:
    document = manifest()
    document["spec"] |= {
        "nodeGroups": [{"name": "g", "nodes": 2, "devicesPerNode": 1}],
        "components": [
            {"name": "train", "role": "Trainer", "placement": {"ranks": "0"}},
            {"name": "infer", "role": "Rollout", "placement": {"ranks": "1"}, "engine": {}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ],
        "weightSync": {"backend": "IPC"},
    }
    with pytest.raises(SpecInvalidError, match=r"spec.weightSync.backend: \"IPC\": needs a trainer rank on every device of the engines"):
        check(document, runnable=False)


def test_schema_and_explain() -> None:
    assert yaml.load(rljob("schema").stdout, yaml.CSafeLoader)["kind"] == "CustomResourceDefinition"
    assert json.loads(rljob("schema", "--json").stdout)["additionalProperties"] is False
    text = rljob("explain", "spec.training.steps").stdout
    assert text.startswith("spec.training.steps  (integer, default 100, at least 0")
    assert "promptsPerStep" in rljob("explain", "spec.rollout").stdout
    (kept,) = [line for line in rljob("explain", "spec.checkpoint").stdout.splitlines() if line.startswith("  journal")]
    assert kept.endswith("so that a restart need not generate them again; 9 bytes per token.")


def test_run_hands_over_the_chosen_job_and_its_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []

    def run_job(text: str, path: Path, run_dir: Path | None, overwrite: bool, resume: bool, metrics_port: int | None) -> int:
        calls.append((check(text).job.metadata.name, path, run_dir, overwrite, resume))
        return 3

    fake = type(sys)("rljob_runtime.entry.local_run")
    fake.run_job = run_job
    monkeypatch.setitem(sys.modules, "rljob_runtime.entry.local_run", fake)
    file = tmp_path / "jobs.yaml"
    other = {**manifest(), "metadata": {"name": "other"}}
    file.write_text(f"{json.dumps(manifest())}\n---\n{json.dumps(other)}\n")
    result = rljob("run", str(file), "--name", "other", "--run-dir", "out", "--resume")
    assert (result.exit_code, calls) == (3, [("other", file, Path("out"), False, True)])


@pytest.mark.parametrize("size", ["small", "10m"])
def test_model_tiny_says_what_it_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: str) -> None:
    calls: list[tuple[object, ...]] = []

    def make(out_folder: Path, *, size: TinySize, seed: int, progress: Callable[[str, float], None]) -> TinySummary:
        progress("rules", 0.5)
        calls.append((out_folder, size, seed))
        return TinySummary(
            folder=out_folder,
            reused=False,
            fingerprint="f",
            task="basic_arithmetic",
            seed=seed,
            num_parameters=300_000,
            vocab_size=20,
            sampled_pass_rate=0.25,
            greedy_pass_rate=0.5,
            num_measured=100,
            rule_steps=1,
            noise_steps=1,
            elapsed_s=12.0,
        )

    monkeypatch.setattr(model, "make_tiny_model", make)
    result = rljob("model", "tiny", "--out", str(tmp_path / "m"), "--seed", "3", "--size", size)
    assert (result.exit_code, calls) == (0, [(tmp_path / "m", model.SIZES[size], 3)])
    assert result.stdout == f"{tmp_path / 'm'}: made in 12 s, 0.3 million parameters, solves 25% of basic_arithmetic when sampled\n"


def test_a_model_that_cannot_be_made_exits_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(*arguments: object, **options: object) -> TinySummary:
        raise ModelError("the folder holds something else; choose another")

    monkeypatch.setattr(model, "make_tiny_model", make)
    result = rljob("model", "tiny", "--out", str(tmp_path))
    assert result.exit_code == 3
    assert "the folder holds something else; choose another" in result.stderr


def test_help_names_the_exit_codes() -> None:
    text = rljob("--help").stdout
    assert all(word in text for word in ("validate", "plan", "schema", "explain", "run", "model", "130 interrupted"))


HEAVY = ("torch", "vllm", "ray", "transformers", "numpy", "rich.console", "kubernetes_asyncio", "aiohttp", "prometheus_client")
MAX_MODULES = {"validate": 600, "--help": 200}
"""A few more than today. Seconds would say what else the machine does: `python -X importtime -m rljob_runtime.commands.cli` shows them."""


@pytest.mark.parametrize("arguments", [["validate", QUICKSTART], ["--help"]], ids=["validate", "help"])
def test_imports_little(arguments: list[str]) -> None:
    code = (
        "import json, sys, atexit\n"
        "atexit.register(lambda: sys.stderr.write(json.dumps(sorted(sys.modules))))\n"
        f"sys.argv = ['rljob', *{arguments!r}]\n"
        "from rljob_runtime.commands.cli import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert not modules & set(HEAVY)
    assert len(modules) <= MAX_MODULES[arguments[0]], sorted(modules)
