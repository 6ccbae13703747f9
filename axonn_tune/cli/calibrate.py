"""``axonn-tune calibrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import launch_options

if TYPE_CHECKING:
    from axonn_tune.calibrate.findings import Findings
    from axonn_tune.calibrate.setting import Request
    from axonn_tune.io.journal import Journal
    from axonn_tune.search.search import Search
    from axonn_tune.spec.machine import Machine

_PARTS = ("gemm", "memory", "links")
MOST_SHAPES = {True: 60, False: 600}  # in a quick and in a thorough calibration


@click.command("calibrate")
@click.option(
    "--output", required=True, type=click.Path(dir_okay=False), help="The profile to write."
)
@click.option("--quick", is_flag=True, help="About a minute, instead of a thorough calibration.")
@click.option(
    "--only",
    type=click.Choice(_PARTS),
    multiple=True,
    help="Measure this part; may be given several times. The rest is taken from --machine.",
)
@click.option("--resume", is_flag=True, help="Go on with a calibration that was interrupted.")
@click.option("--machine", help="A profile that says what is not measured (preset or YAML file).")
@click.option(
    "--import",
    "imports",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="Measure nothing: take logs of nccl-tests, rccl-tests or OSU, or products as CSV.",
)
@click.option("--kind", help="Kind of collective of the logs, where they do not tell.")
@click.option("--log-ranks", type=click.IntRange(min=2), help="Ranks of an OSU log.")
@click.option("--log-ranks-per-node", type=click.IntRange(min=1), help="And those of each node.")
@click.option("--name", help="Name of the machine.  [default: that of the file]")
@click.option("--model", help="Measure the products and the attention of this model's search, too.")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs of that search.")
@click.option("--micro-batch", type=click.IntRange(min=1), help="Micro-batch of that search.")
@click.option("--global-batch", type=click.IntRange(min=1), help="Sequences of that search.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Sequence length of that search.")
@click.option(
    "--most-shapes",
    type=click.IntRange(min=1),
    help="Products of that search to measure, the likeliest grids' first.  [default: 600, or 60]",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help="bf16, fp16 or fp32; may be given again.  [default: all on a GPU, --quick bf16; CPU fp32]",
)
@click.option("--levels", metavar="2,8", help="Ranks of the units of each link level.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Ranks to start here.  [default: the GPUs, else the cores]",
)
@launch_options
def command(**options: Any) -> None:
    """Measure this machine, or the nodes of a job, and write a hardware profile.

    Starts a rank for each GPU of this node, or joins those that torchrun or srun has started:
    give each of them the same command. What is measured is on disk at once; after an interrupt,
    --resume goes on.

    \b
    Examples:
      axonn-tune calibrate --output mycluster.yaml
      axonn-tune calibrate --output mycluster.yaml --quick --model 80b --gpus 1024
      srun -N 4 --ntasks-per-node 4 axonn-tune calibrate --output mycluster.yaml
      axonn-tune calibrate --import all_reduce.log --machine perlmutter --output mycluster.yaml
      axonn-tune suggest --gpus 1024 --model 80b --machine mycluster.yaml
    """
    if options["imports"]:
        from axonn_tune.cli.imported import import_logs

        import_logs(options, _base(options["machine"]))
        return
    from axonn_tune.calibrate.measure.run import measure
    from axonn_tune.cli.interrupts import resumable
    from axonn_tune.io.journal import Journal
    from axonn_tune.runtime.ranks.launch import launch, only_rank_0_speaks, ranks_or_cores

    journal = Journal(options["output"] + ".partial")
    with only_rank_0_speaks():
        base = _base(options["machine"])
        request = _request(options, base, journal)
        n_ranks = ranks_or_cores(options["ranks"], options["device"])
        if base is None:
            _check_that_all_is_measured(request.parts, n_ranks)
    with resumable(journal):
        findings = launch(measure, request, n_ranks, options["device"])
    if findings is not None:
        _write(options, findings, base)
        journal.remove()


def _base(name: str | None) -> Machine | None:
    from axonn_tune.io.presets import load_machine

    return None if name is None else load_machine(name)


def _request(options: dict[str, Any], base: Machine | None, journal: Journal) -> Request:
    from axonn_tune.calibrate.measure.attention import AttentionShape
    from axonn_tune.calibrate.measure.gemm import GemmShape
    from axonn_tune.calibrate.plan import GPT_LIKE, LLAMA_LIKE
    from axonn_tune.calibrate.setting import Request
    from axonn_tune.calibrate.wanted import kernels_of, largest_messages
    from axonn_tune.errors import InputError
    from axonn_tune.runtime.axonn.engine import DTYPES as TRAINED_DTYPES
    from axonn_tune.runtime.ranks.launch import default_dtype
    from axonn_tune.spec.checks import require_choice
    from axonn_tune.spec.job import BYTES_PER_ELEMENT

    dtypes = options["dtypes"] or _default_dtypes(default_dtype(options["device"]), options)
    for dtype in dtypes:
        require_choice("calibrate", "--dtype", dtype, BYTES_PER_ELEMENT)
    if not set(dtypes) & set(TRAINED_DTYPES):
        raise InputError(
            f"--dtype {' '.join(dtypes)}: kernels are timed in small training steps; add one of "
            f"{', '.join(TRAINED_DTYPES)}"
        )
    search = _search(options, base, dtypes[0])
    products, attentions = ([], []) if search is None else kernels_of(search)
    most = options["most_shapes"] or MOST_SHAPES[options["quick"]]
    return Request(
        parts=options["only"] or _PARTS,
        is_quick=options["quick"],
        dtypes=dtypes,
        journal=journal,
        resume=options["resume"],
        models=(GPT_LIKE, LLAMA_LIKE) if search is None else (search.model,),
        gemm_shapes=tuple(GemmShape(*product, dtypes[0]) for product in products[:most]),
        attention_shapes=tuple(AttentionShape(*sizes, dtypes[0]) for sizes in attentions[:most]),
        n_shapes_left_out=max(len(products) - most, 0),
        largest_messages={} if search is None else largest_messages(search),
        units=_units(options["levels"]),
        device=options["device"],
        timeout_seconds=options["timeout"],
        quiet=options["quiet"],
    )


def _default_dtypes(first: str, options: dict[str, Any]) -> tuple[str, ...]:
    """All of them where there are GPUs and time; a CPU is slow at any but fp32."""
    return (first,) if options["quick"] or first == "fp32" else ("bf16", "fp16", "fp32")


def _check_that_all_is_measured(parts: tuple[str, ...], n_ranks: int) -> None:
    from axonn_tune.errors import InputError

    missing = [part for part in _PARTS if part not in parts]
    if missing:
        raise InputError(
            f"--only leaves out {' and '.join(missing)}; give --machine, a profile that has them"
        )
    if n_ranks == 1:
        raise InputError(
            "one rank has no links to measure; start more, or give --machine, a profile with links"
        )


def _search(options: dict[str, Any], base: Machine | None, dtype: str) -> Search | None:
    """The search whose kernels are to be timed."""
    from axonn_tune.api import DEFAULT_MACHINE, build_search
    from axonn_tune.errors import InputError

    if options["model"] is None and options["gpus"] is None:
        return None
    if options["model"] is None or options["gpus"] is None:
        raise InputError("--model and --gpus go together: they say which search to measure for")
    return build_search(
        options["model"],
        options["gpus"],
        base or DEFAULT_MACHINE,
        micro_batch=options["micro_batch"],
        seq_len=options["seq_len"],
        global_batch=options["global_batch"],
        dtype=dtype,
        include_oom=base is None,  # this machine's memory is not known before it is measured
    )


def _units(text: str | None) -> tuple[int, ...] | None:
    from axonn_tune.errors import InputError

    if text is None:
        return None
    units = text.split(",")
    if not all(unit.strip().isdigit() for unit in units):
        raise InputError(
            f"--levels is '{text}'; allowed: ranks of the units of each level, such as 2,8"
        )
    return tuple(int(unit) for unit in units)


def _write(options: dict[str, Any], findings: Findings, base: Machine | None) -> None:
    import shlex
    import sys
    from datetime import datetime, timezone
    from pathlib import Path

    from axonn_tune.calibrate.fit.assemble import machine_of
    from axonn_tune.io.operating_system import drivers, relevant_variables
    from axonn_tune.io.presets import preset_machines
    from axonn_tune.io.yaml_files import save_yaml
    from axonn_tune.report.calibrate import calibration_text
    from axonn_tune.spec.calibration import Calibration

    output = options["output"]
    calibration = Calibration(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command_line=shlex.join(["axonn-tune", *sys.argv[1:]]),
        device_name=findings.device_name,
        backend=findings.backend,
        n_ranks=findings.n_ranks,
        hosts=findings.hosts,
        seconds=findings.seconds,
        software={**findings.software, **drivers()},
        environment=relevant_variables(),
        speeds=findings.speeds,
        notes=findings.notes,
    )
    name = options["name"] or Path(output).stem
    machine = machine_of(findings, name, calibration, preset_machines(), base)
    save_yaml(output, machine, "Measured by axonn-tune calibrate; see `calibration` at the end.")
    click.echo(calibration_text(machine))
    click.echo(
        f"\nWritten to {output}. Next: axonn-tune suggest --machine {output} --gpus ... --model ..."
    )
