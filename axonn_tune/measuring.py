"""The Python interface to measurements on ranks: `calibrate` and `validate`.

Both need torch. They start a rank for each GPU of this machine, or join the ranks that torchrun or
srun has started; only rank 0 gets a result. A script that calls them needs the guard
``if __name__ == "__main__":``, because the started ranks import the script.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_tune.api import DEFAULT_MACHINE, MachineLike, ModelLike, build_search
from axonn_tune.errors import InputError
from axonn_tune.io.journal import Journal, MeasurementJournal
from axonn_tune.io.operating_system import drivers, relevant_variables
from axonn_tune.io.presets import load_machine, preset_machines
from axonn_tune.io.yaml_files import save_yaml
from axonn_tune.options import SearchOptions, SubjectOptions, with_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from axonn_tune.calibration.campaign import Campaign
    from axonn_tune.calibration.selection import Extent
    from axonn_tune.runtime.run import TrainerFactory
    from axonn_tune.spec.machine import Machine
    from axonn_tune.spec.validation import Validation
    from axonn_tune.validation.campaign import ValidationCampaign


@with_options(SubjectOptions, SearchOptions)
def validate(
    model: ModelLike,
    machine: MachineLike,
    gpus: int | None = None,
    choice: str = "all",
    grids: Sequence[str] = (),
    steps: int = 10,
    device: str = "auto",
    timeout: float = 300.0,
    quiet: bool = False,
    **options: Unpack[SearchOptions],
) -> Validation | None:
    """Run many layouts of a model, and compare the predicted with the measured step of each.

    Parameters
    ----------
    choice : str
        The layouts that run: ``"all"``, ``"top:6"``, or ``"spread:6"``, evenly over the ranking.
    grids : sequence of str
        Layouts that run instead, in addition to the best one.
    steps : int
        Number of training steps of each run, at least 3.
    device : str
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    timeout : float
        Time after which a collective counts as hung. [s]
    quiet : bool
        Whether to show no progress.
    {options}

    Returns
    -------
    axonn_tune.spec.validation.Validation or None
        The outcome of every configuration; None on ranks other than 0.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or the ranks cannot meet.
    """
    campaign = validation_campaign(
        model, machine, gpus, choice=choice, grids=grids, steps=steps, device=device, **options
    )
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(str(Path(folder) / "validation.partial"), "validation")
        measurements = MeasurementJournal(journal)
        return run_validation(campaign, measurements, device=device, timeout=timeout, quiet=quiet)


def validation_campaign(
    model: ModelLike,
    machine: MachineLike,
    gpus: int | None = None,
    *,
    choice: str = "all",
    grids: Sequence[str] = (),
    steps: int = 10,
    device: str = "auto",
    **options: Any,
) -> ValidationCampaign:
    """Choose the configurations that a validation runs; see `validate`."""
    from axonn_tune.runtime.ranks.launch import default_dtype, ranks_at_hand
    from axonn_tune.validation.campaign import ValidationCampaign, runnable

    n_ranks = gpus or ranks_at_hand(device)
    chosen = runnable(options.pop("strategy", "axonn"))
    options["dtype"] = options.get("dtype") or default_dtype(device)
    options["global_batch"] = options.get("global_batch") or n_ranks
    search = build_search(
        model, n_ranks, machine, strategy=chosen.strategy, fix=chosen.fixed_axes, **options
    )
    return ValidationCampaign.of(search, choice, grids, steps)


def run_validation(
    campaign: ValidationCampaign,
    keeper: MeasurementJournal,
    *,
    resume: bool = False,
    device: str = "auto",
    timeout: float = 300.0,
    quiet: bool = False,
    command_line: str = "",
    factory: TrainerFactory | None = None,
) -> Validation | None:
    """Run the rest of a campaign, keep each result at once, and return the validation.

    The result is None on ranks other than 0.
    """
    from axonn_tune.runtime.ranks.launch import is_speaker
    from axonn_tune.runtime.ranks.series import RunSeries, launch_series
    from axonn_tune.runtime.request import RunRequest
    from axonn_tune.runtime.run import build_trainer

    scenario = campaign.ranking.search.scenario
    requests = [
        RunRequest(
            model=scenario.model,
            job=scenario.job,
            configuration=prediction.configuration,
            n_steps=campaign.n_steps,
            device=device,
            timeout_seconds=timeout,
            quiet=True,
            strategy=scenario.strategy.name,
        )
        for prediction in campaign.chosen
    ]
    if is_speaker():
        open_journal = keeper.journal.read if resume else keeper.journal.begin
        open_journal(campaign.owner)
    runs = [(str(request.configuration), request) for request in requests]
    series = RunSeries(runs, keeper, device, timeout, quiet, factory or build_trainer)
    launch_series(series, scenario.job.n_gpus)
    if not is_speaker():
        return None
    return campaign.validation(keeper.ended(), command_line, drivers(), relevant_variables())


def calibrate(
    output: str | Path,
    *,
    name: str | None = None,
    resume: bool = False,
    machine: str | None = None,
    only: tuple[str, ...] = (),
    quick: bool = False,
    dtypes: tuple[str, ...] = (),
    model: str | None = None,
    gpus: int | None = None,
    ranks: int | None = None,
    levels: str | None = None,
    device: str = "auto",
    timeout: float = 300.0,
    quiet: bool = False,
) -> Machine | None:
    """Measure this machine, or the nodes of a job, and write a hardware profile.

    Parameters
    ----------
    output : str or path
        The file of the profile.
    name : str or None
        Name of the machine; by default the name of the file.
    resume : bool
        Whether to go on with a calibration that was interrupted.
    machine : str or None
        A profile that states what is not measured (a preset or a YAML file).
    only : tuple of str
        Parts to measure (``gemm``, ``memory``, ``links``); by default all.
    quick : bool
        Whether to measure for about a minute only, and less thoroughly.
    dtypes : tuple of str
        bf16, fp16 or fp32; by default those that suit the device.
    model, gpus : str, int or None
        The search whose products and attention are measured too.
    ranks : int or None
        Number of ranks to start here; by default one for each GPU, or for each core.
    levels : str or None
        Ranks of the units of each link level, such as ``"2,8"``; by default they are measured.
    device : str
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    timeout : float
        Time after which a collective counts as hung. [s]
    quiet : bool
        Whether to show no progress.

    Returns
    -------
    Machine or None
        The profile that was written; None on ranks other than 0.

    Raises
    ------
    AxonnTuneError
        An option is wrong, the file cannot be written, or a rank fails.
    """
    journal = Journal(f"{output}.partial")
    campaign = calibration_campaign(
        machine,
        only=only,
        quick=quick,
        dtypes=dtypes,
        model=model,
        gpus=gpus,
        ranks=ranks,
        levels=levels,
        device=device,
        timeout=timeout,
        quiet=quiet,
    )
    measured = campaign.measure(campaign.request(journal, resume))
    if measured is None:
        return None
    profile = campaign.profile(
        measured,
        name or Path(output).stem,
        preset_machines(),
        drivers=drivers(),
        environment=relevant_variables(),
    )
    save_yaml(output, profile, PROFILE_HEADER)
    journal.remove()
    return profile


PROFILE_HEADER = "Measured by axonn-tune calibrate; see `calibration` at the end."


def calibration_campaign(
    machine: str | None = None,
    *,
    only: tuple[str, ...] = (),
    quick: bool = False,
    dtypes: tuple[str, ...] = (),
    model: str | None = None,
    gpus: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    most_shapes: int | None = None,
    levels: str | None = None,
    ranks: int | None = None,
    device: str = "auto",
    timeout: float = 300.0,
    quiet: bool = False,
    extent: Extent | None = None,
) -> Campaign:
    """Check the options of a calibration and load what they name; see `calibrate`.

    Raises
    ------
    AxonnTuneError
        An option is wrong; the message names it, its value and what is allowed.
    """
    from axonn_tune.calibration.campaign import PARTS, Campaign, check_dtypes, default_dtypes
    from axonn_tune.runtime.ranks.launch import ranks_or_cores

    base = None if machine is None else load_machine(machine)
    dtypes = dtypes or default_dtypes(quick, device)
    check_dtypes(dtypes)
    search = None
    if model is not None and gpus is not None:
        search = build_search(
            model,
            gpus,
            base or DEFAULT_MACHINE,
            micro_batch=micro_batch,
            seq_len=seq_len,
            global_batch=global_batch,
            dtype=dtypes[0],
            include_oom=base is None,  # this machine's memory is not known before it is measured
        )
    elif model is not None or gpus is not None:
        raise InputError("--model and --gpus go together: they say which search to measure for")
    return Campaign(
        dtypes=dtypes,
        n_ranks=ranks_or_cores(ranks, device),
        parts=only or PARTS,
        is_quick=quick,
        base=base,
        search=search,
        most_shapes=most_shapes,
        units=_units(levels),
        device=device,
        timeout_seconds=timeout,
        quiet=quiet,
        extent=extent,
    )


def _units(text: str | None) -> tuple[int, ...] | None:
    """Read the numbers of ranks of the units of each link level."""
    if text is None:
        return None
    units = text.split(",")
    if not all(unit.strip().isdigit() for unit in units):
        raise InputError(
            f"--levels is '{text}'; allowed: ranks of the units of each level, such as 2,8"
        )
    return tuple(int(unit) for unit in units)
