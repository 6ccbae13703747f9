"""The job script: what it asks for, and that nothing in it is read as anything but a text."""

import json
import shlex
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_scripts.placement import options
from worlds import machine_of

from axonn_tune.cli.main import main
from axonn_tune.errors import InputError
from axonn_tune.io.package_data import training_program
from axonn_tune.io.presets import load_machine, load_model
from axonn_tune.job_scripts.quoting import command, directive, export, words
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import parse_layout
from axonn_tune.spec.machine import JobScript
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.strategies.named import strategy_named
from axonn_tune.strategies.switches import Switches

HERE = Path(__file__).parent
MODEL = load_model("tiny")
LAYOUTS = {
    "axonn": "1x1x2x2",
    "megatron": "tensor=2,data=2",
    "zero3": "shard=4",
    "zeropp": "secondary=2,across=2",
}


def prediction_of(
    strategy="axonn",
    host=None,
    model=MODEL,
    layout=None,
    machine=None,
    switches=None,
    mtp_modules=0,
    precision="bf16",
    optimizer="adamw",
    **run,
):
    machine = replace(machine or machine_of(), job_script=host or JobScript())
    strategy = strategy_named(strategy, switches, has_experts=not model.is_dense)
    parsed = parse_layout(layout or LAYOUTS[strategy.name], strategy.axes)
    trained = {"mtp_modules": mtp_modules, "precision": precision, "optimizer": optimizer}
    job = Job(parsed.n_ranks, 8 * parsed.n_ranks, model.seq_len, **trained)
    scenario = Scenario(model, job, machine, strategy)
    return predict(scenario, Configuration(parsed, **run))


def with_experts(**sizes):
    """The model with four experts in some layers."""
    return replace(MODEL, experts=Experts(n_experts=4, top_k=2, hidden_size=8, **sizes))


def script_of(*given, sbatch_options=(), train=None, **more):
    files = launch_files(prediction_of(*given, **more), train=train, sbatch_options=sbatch_options)
    return files["launch.sbatch"]


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_the_job_has_its_nodes_for_itself_and_a_log(strategy):
    asked = options(script_of(strategy))
    assert "--exclusive" in asked and asked["--output"] == "%x-%j.log"
    assert asked["--job-name"] == MODEL.name and asked["--kill-on-bad-exit"] == "1"


def test_the_ranks_of_a_node_share_its_processors():
    script = script_of()
    assert "--cpus-per-task=$((SLURM_CPUS_ON_NODE / 4)) \\" in script
    given = script_of(host=JobScript(srun=("--cpus-per-task=7",)))
    assert options(given)["--cpus-per-task"] == "7" and "SLURM_CPUS_ON_NODE" not in given


def test_what_nobody_has_given_waits_to_be_filled_in():
    script = script_of()
    assert "##SBATCH --account=YOUR_ACCOUNT\n##SBATCH --time=01:00:00\n" in script
    assert "# Fill in before you submit" in script
    given = script_of(sbatch_options=("--account=abc", "-t 10"))
    assert "##SBATCH" not in given
    assert "#SBATCH --account=abc\n#SBATCH -t 10\n" in given


def test_modules_and_container_come_from_the_machine():
    host = JobScript(modules=("rocm/6.2",), container=("apptainer", "exec", "--nv", "image.sif"))
    script = script_of(host=host)
    assert "\nmodule load rocm/6.2\nset -euo pipefail\n" in script
    assert "\n  bash rank.sh apptainer exec --nv image.sif python train_axonn.py" in script


@pytest.mark.parametrize("machine", ["perlmutter", "alps", "dgx-h100", "frontier"])
def test_the_order_of_kernels_is_asked_for_by_the_framework(machine):
    """Megatron-LM asserts the variable, FSDP2 is slower with it, whatever the machine."""
    exported = "\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in load_machine(machine).job_script.environment
    assert exported in script_of("megatron", machine=load_machine(machine))
    assert exported not in script_of("zero3", machine=load_machine(machine))


def test_blackwell_needs_no_order_of_kernels():
    script = script_of("megatron", machine=load_machine("dgx-b200"))
    assert "\nexport CUDA_DEVICE_MAX_CONNECTIONS=32\n" in script


def test_exchanges_beside_kernels_need_more_connections():
    switches = Switches(overlaps_experts=True)
    layout = "tensor=2,data=2,expert=2"
    script = script_of("megatron", model=with_experts(), switches=switches, layout=layout)
    assert "\nexport CUDA_DEVICE_MAX_CONNECTIONS=32\n" in script


def test_a_program_of_the_user_takes_the_place_of_the_written_one():
    assert "bash rank.sh python my.py\n" in script_of(train="my.py")
    assert "bash rank.sh python lm/pretrain_gpt.py \\" in script_of(
        "megatron", train="lm/pretrain_gpt.py"
    )


def known_flags():
    lines = (HERE / "megatron_flags.txt").read_text().splitlines()
    return {line.partition(" ")[::2] for line in lines if not line.startswith("#")}


def flags_of(script):
    """Each flag of Megatron-LM with its value."""
    command = script[script.index("\nsrun ") :].replace("\\\n", " ")
    found = shlex.split(command.partition("pretrain_gpt.py")[2])
    for word, following in zip(found, [*found[1:], "--"], strict=True):
        if word.startswith("--"):
            yield word, "" if following.startswith("--") else following


def kind(value):
    if not value:
        return ""
    return "number" if value.replace(".", "").replace("e-", "").isdigit() else "word"


def test_megatron_knows_every_flag():
    llama = load_model("llama3-8b")
    plain = Switches(
        sequence_parallel=False, distributed_optimizer=False, overlap_grad_reduce=False
    )
    virtual = Switches(virtual_stages=2)
    cases = [
        {"recompute": "full", "model": llama},
        {"recompute": "selective", "layout": "pipeline=3,data=1"},
        {"layout": "pipeline=2,data=2", "n_virtual": 2, "switches": virtual},
        {"layout": "context=2,data=2", "switches": Switches(context_kind="ulysses")},
        {"layout": "tensor=2,data=2", "switches": Switches(overlaps_tensor=True)},
        {"switches": Switches(shard_gradients=True)},
        {"layout": "ulysses=2,ring=2", "switches": Switches(context_kind="ulysses_ring")},
        {"switches": plain, "model": replace(llama, qkv_bias=True)},
        {"model": replace(MODEL, position="none", n_kv_heads=2)},
        {"model": load_model("deepseek-v2"), "layout": "data=4,expert=4"},
        {"recompute": "selective:mlp,layernorm", "model": llama},
        {"model": load_model("llama4-scout"), "layout": "data=4,expert=4"},
        {"model": load_model("gpt-oss-120b"), "layout": "data=4,expert=4"},
        {
            "model": with_experts(),
            "layout": "tensor=2,data=2,expert=2",
            "switches": Switches(sends_once=True, overlaps_experts=True),
        },
        {"model": with_experts(every=2, shared_hidden_size=8, shared_gate=True)},
        {"model": replace(MODEL, activation="squared-relu")},
        {"optimizer": "muon"},
    ]
    found = set()
    for case in cases:
        found |= {(flag, kind(value)) for flag, value in flags_of(script_of("megatron", **case))}
    assert found <= known_flags()
    needed = {"--mock-data", "--train-iters", "--lr", "--tokenizer-type", "--vocab-size"}
    needed |= {"--tp-comm-overlap", "--use-megatron-fsdp", "--muon-tp-mode"}
    assert needed <= {flag for flag, _ in found}


def test_megatron_is_told_its_optimizer():
    """With Muon, --use-distributed-optimizer lets replicas share whole matrices."""
    script = script_of("megatron", optimizer="muon")
    given = dict(flags_of(script))
    assert given["--optimizer"] == "muon" and given["--muon-tp-mode"] == "duplicated"
    assert given["--muon-num-ns-steps"] == "5" and "--use-distributed-optimizer" in given
    assert "Emerging-Optimizers" in script
    usual = script_of("megatron")
    assert "--optimizer" not in dict(flags_of(usual)) and "Emerging-Optimizers" not in usual
    with pytest.raises(InputError, match=r"no such optimizer, .*; allowed: adamw, muon"):
        script_of("megatron", optimizer="ademamix")


def expert_layers(pattern, n_layers):
    """The layers with experts, as Megatron-LM's moe_freq_type and gpt_layer_specs.py read them."""
    if "[" in pattern:
        flags = [part.partition("*") for part in pattern.split("+")]
        return [flag == "[1]" for flag, _, count in flags for _ in range(int(count))]
    return [layer % int(pattern) == 0 for layer in range(n_layers)]


@pytest.mark.parametrize(
    "sizes", [{"first_layer": 1}, {"every": 2}, {"first_layer": 1, "every": 3}]
)
def test_megatron_has_experts_in_the_same_layers(sizes):
    model = replace(with_experts(**sizes), n_layers=8)
    given = dict(flags_of(script_of("megatron", model=model)))
    layers = expert_layers(given["--moe-layer-freq"], 8)
    assert layers == [block.has_experts for block in model.blocks]
    everywhere = dict(flags_of(script_of("megatron", model=with_experts())))
    assert "--moe-layer-freq" not in everywhere and everywhere["--num-experts"] == "4"


def test_stages_of_unlike_length_are_written_as_a_layout():
    model = replace(MODEL, n_layers=5)
    given = dict(flags_of(script_of("megatron", model=model, layout="pipeline=2,data=2")))
    assert given["--pipeline-model-parallel-layout"] == "Ettt|ttL"


def test_a_written_layout_has_the_modules_of_multi_token_prediction():
    """Megatron-Core asserts that it has as many as --mtp-num-layers says."""
    model = replace(MODEL, n_layers=5, mtp_modules=2, position="rotary")
    case = {"model": model, "layout": "pipeline=2,data=2", "mtp_modules": 2}
    given = dict(flags_of(script_of("megatron", **case)))
    assert given["--pipeline-model-parallel-layout"] == "Ettt|ttmmL"
    assert given["--mtp-num-layers"] == "2"


@pytest.mark.parametrize("splits", [False, True])
def test_megatron_spreads_experts_as_predicted(splits):
    switches = Switches(split_experts=splits)
    case = {"model": with_experts(), "layout": "tensor=2,data=2,expert=2", "switches": switches}
    given = dict(flags_of(script_of("megatron", **case)))
    assert given["--expert-model-parallel-size"] == "2"
    assert given["--expert-tensor-parallel-size"] == ("2" if splits else "1")


@pytest.mark.parametrize("precision", ["bf16", "fp8-current"])
@pytest.mark.parametrize("sends_once", [False, True])
def test_megatron_routes_and_pads_as_predicted(precision, sends_once):
    """Probabilities are in fp32, and what DeepEP brings is padded without a copy of its own."""
    case = {"model": with_experts(), "machine": load_machine("dgx-h100"), "precision": precision}
    switches = Switches(sends_once=sends_once)
    given = dict(flags_of(script_of("megatron", **case, switches=switches)))
    assert given["--moe-router-dtype"] == "fp32"
    is_padded = sends_once and precision != "bf16"
    assert ("--moe-router-padding-for-quantization" in given) == is_padded


def test_windows_count_the_token_itself_and_leave_out_full_layers():
    model = replace(MODEL, window=8, full_attention_every=2)
    given = dict(flags_of(script_of("megatron", model=model)))
    assert given["--window-size"] == "(7,0)" and given["--window-attn-skip-freq"] == "2"
    wide = replace(model, window=MODEL.seq_len)
    assert "--window-size" not in dict(flags_of(script_of("megatron", model=wide)))


def test_megatron_does_not_overlap_exchanges_with_full_recomputation():
    switches = Switches(overlaps_experts=True)
    with pytest.raises(InputError, match="--overlaps-experts: Megatron-Core does not overlap"):
        script_of("megatron", model=with_experts(), switches=switches, recompute="full")


@pytest.mark.parametrize("part", [{"window": 8}, {"qk_norm": "head"}])
def test_the_programs_of_other_frameworks_refuse_what_they_do_not_build(part):
    with pytest.raises(InputError, match=r"model tiny has .*; allowed where a script of fsdp2"):
        script_of("zero3", model=replace(MODEL, **part))


# Texts that mean something to a shell, to Python or to sbatch.
HOSTILE = [
    "it's",
    'say "x"',
    "$(touch hit)",
    "`touch hit`",
    "a; touch hit",
    "a && touch hit &",
    "a | touch hit",
    "> hit",
    "$HOME",
    "back\\slash\\",
    "*",
    "a #b",
    "!!",
    "{x}",
    "%s",
    '""" + open("hit", "w") + """',
]
# Stand-ins of what Slurm and modules bring; each writes the words that it was given.
STUBS = """\
told() { printf '%s\\0' "$@" >> told; }
scontrol() { echo n1; }
module() { told "$@"; }
srun() { told "${MARK-}" "$@"; }
export SLURM_JOB_NODELIST=n1 SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_CPUS_ON_NODE=8
"""


def words_told(folder, script):
    """The words that a job script hands to commands, when bash runs it in an empty folder."""
    subprocess.run(["bash", "-c", STUBS + script], cwd=folder, check=True)
    assert [path.name for path in folder.iterdir()] == ["told"], "something else has run"
    return (folder / "told").read_text().split("\0")


@pytest.mark.parametrize("text", HOSTILE)
def test_a_shell_reads_every_text_as_it_is(tmp_path, text):
    """A text reaches the writer although readers refuse it as a name."""
    host = JobScript((), (shlex.quote(f"--x={text}"),), {"MARK": text}, (text,), (text,))
    prediction = prediction_of(host=host, model=replace(MODEL))
    object.__setattr__(prediction.scenario.model, "name", text)
    object.__setattr__(prediction.scenario.machine.gpu, "name", text)
    files = launch_files(prediction, train=text)
    told = words_told(tmp_path, files["launch.sbatch"])
    assert told[:3] == ["load", text, text] and f"--x={text}" in told
    assert told[-4:] == [text, "python", text, ""]
    programs = {name: written for name, written in files.items() if name.endswith(".py")}
    assert programs == {name: training_program(name) for name in programs}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_reaches_neither_a_script_nor_python(tmp_path, text):
    """Readers refuse it, or it is quoted."""
    path = tmp_path / "model.yaml"
    quoted = "'" + text.replace("'", "''") + "'"
    path.write_text(
        f"name: {quoted}\nn_layers: 2\nhidden_size: 64\nn_heads: 4\nvocab_size: 128\nseq_len: 16\n"
    )
    folder = tmp_path / "run"
    arguments = ["--gpus", "4", "--model", str(path), "--output", str(folder)]
    with suppress(SystemExit):
        main(["launch", *arguments])
    if folder.exists():
        (tmp_path / "empty").mkdir()
        words_told(tmp_path / "empty", (folder / "launch.sbatch").read_text())
        assert json.loads((folder / "settings.json").read_text())["model"]["name"] == text


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "x" * 201])
def test_a_name_is_checked_when_it_is_read(name):
    with pytest.raises(InputError, match=r"name is .*; allowed: up to 200 characters"):
        replace(MODEL, name=name)
    with pytest.raises(InputError, match="machine: name is"):
        replace(machine_of(), name=name)
    with pytest.raises(InputError, match="gpu: name is"):
        replace(machine_of().gpu, name=name)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"environment": {"A B": "x"}}, "environment has 'A B'; allowed: the name of a variable"),
        ({"environment": {"A": "x\ny"}}, "environment is .*; allowed: one line"),
        ({"sbatch": ("--x\n#SBATCH --y",)}, "sbatch is .*; allowed: one line"),
        ({"modules": ("a\x00",)}, "modules is .*; allowed: one line"),
    ],
)
def test_settings_of_a_job_script_are_checked_when_they_are_read(entries, said):
    with pytest.raises(InputError, match=said):
        JobScript(**entries)


def test_a_quote_that_is_never_closed_is_named():
    with pytest.raises(InputError, match=r"option of sbatch .*: no closing quotation"):
        script_of(sbatch_options=("--comment='a",))


def test_a_new_line_in_an_option_ends_no_directive():
    script = script_of(sbatch_options=("--comment=a\ntouch hit",))
    assert "#SBATCH --comment=a touch hit\n" in script


def of_shell(text):
    """The words that bash reads in a text."""
    script = f"printf '%s\\0' {text}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0")), min_size=1))
def test_quoting_is_undone_by_a_shell(texts):
    assert of_shell(command(texts)) == texts
    assert words(command(texts), "x") == texts
    name, _, value = export("A", texts[0]).partition("=")
    assert name == "export A" and of_shell(value) == texts[:1]
    assert directive(texts).count("\n") == 0
