"""The Python interface to measurements on ranks: `calibrate` and `validate`.

Both need torch. They start a rank for each GPU of this machine, or join the ranks that torchrun or
srun has started; only rank 0 gets a result. A script that calls them needs the guard
``if __name__ == "__main__":``, because the started ranks import the script.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_tune.api.searching import MachineLike, ModelLike, build_search, loaded
from axonn_tune.errors import InputError
from axonn_tune.io.journal import Journal, MeasurementJournal
from axonn_tune.io.operating_system import drivers, relevant_variables
from axonn_tune.io.presets import list_engines, load_engine, load_machine, preset_machines
from axonn_tune.io.yaml_files import save_yaml
from axonn_tune.options import (
    CALIBRATION,
    VALIDATION,
    CalibrationOptions,
    SearchOptions,
    ValidationOptions,
    declared,
    defaults,
    with_options,
)
from axonn_tune.spec.calibration import PARTS
from axonn_tune.spec.checks import whole_number
from axonn_tune.spec.track_record import NO_TRACK_RECORDS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from axonn_tune.calibration.campaign import Campaign
    from axonn_tune.calibration.request import Request
    from axonn_tune.calibration.selection import Extent
    from axonn_tune.runtime.run import TrainerFactory
    from axonn_tune.spec.machine import Machine
    from axonn_tune.spec.validation import Validation
    from axonn_tune.validation.campaign import ValidationCampaign
    from axonn_tune.validation.runnable import RunnableStrategy


@with_options(VALIDATION)
def validate(
    model: ModelLike,
    machine: MachineLike,
    gpus: int | None = None,
    **options: Unpack[ValidationOptions],
) -> Validation | None:
    """Run many layouts of a model, and compare the predicted with the measured step of each.

    Parameters
    ----------
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
    campaign = validation_campaign(model, machine, gpus, **options)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(str(Path(folder) / "validation.partial"), "validation")
        return run_validation(campaign, MeasurementJournal(journal))


def validation_campaign(
    model: ModelLike,
    machine: MachineLike,
    gpus: int | None = None,
    **options: Unpack[ValidationOptions],
) -> ValidationCampaign:
    """Choose the configurations that a validation runs; see `validate`."""
    from axonn_tune.runtime.ranks.launch import default_dtype, ranks_at_hand
    from axonn_tune.runtime.request import require_built
    from axonn_tune.search.rank import rank_candidates
    from axonn_tune.validation.campaign import ValidationCampaign
    from axonn_tune.validation.choice import choose, choose_grids

    given = {**defaults(VALIDATION), **options}
    device = given["device"]
    n_ranks = gpus or ranks_at_hand(device)
    chosen = run_here(given["strategy"], given["engine"])
    require_built(loaded(model), given["seq_len"])
    of_search = {name: value for name, value in given.items() if name in declared(SearchOptions)}
    of_search |= {
        "strategy": chosen.strategy,
        "fix": chosen.fixed_axes,
        "dtype": given["dtype"] or default_dtype(device),
        "global_batch": given["global_batch"] or n_ranks,
    }
    search = build_search(model, n_ranks, machine, **of_search)
    # A validation judges what the profile tells of this machine, not what runs elsewhere show.
    scenario = replace(search.scenario, track_records=NO_TRACK_RECORDS)
    ranking = rank_candidates(chosen.search_of(replace(search, scenario=scenario)))
    grids = given["grid"]
    return ValidationCampaign(
        ranking=ranking,
        chosen=choose_grids(ranking, grids) if grids else choose(ranking, given["grids"]),
        n_steps=given["steps"],
        device=device,
        timeout_seconds=given["timeout"],
        quiet=given["quiet"],
    )


def run_here(strategy: str | None, engine: str | None) -> RunnableStrategy:
    """Return what is executed for a strategy, through the runtime and torch or an engine.

    Where no strategy is named, it is the first one that is executed so.

    Raises
    ------
    AxonnTuneError
        The strategy or the engine is unknown, or is not executed here.
    """
    from axonn_tune.validation.runnable import runnable

    if engine is None:
        return runnable(strategy)
    loaded = load_engine(engine)
    if not loaded.package:
        run = [name for name in list_engines() if load_engine(name).package]
        raise InputError(
            f"--engine {loaded.name} cannot be run here; allowed: {', '.join(run)}, or no --engine "
            "for the bundled runtime and torch"
        )
    return runnable(strategy, loaded)


def run_validation(
    campaign: ValidationCampaign,
    keeper: MeasurementJournal,
    resume: bool = False,
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
            device=campaign.device,
            timeout_seconds=campaign.timeout_seconds,
            quiet=True,
            strategy=scenario.strategy.name,
            engine=scenario.strategy.engine,
        )
        for prediction in campaign.chosen
    ]
    if is_speaker():
        open_journal = keeper.journal.read if resume else keeper.journal.begin
        open_journal(campaign.owner)
    runs = [(str(request.configuration), request) for request in requests]
    series = RunSeries(
        runs,
        keeper,
        campaign.device,
        campaign.timeout_seconds,
        campaign.quiet,
        factory or build_trainer,
    )
    launch_series(series, scenario.job.n_gpus)
    if not is_speaker():
        return None
    return campaign.validation(keeper.ended(), command_line, drivers(), relevant_variables())


@with_options(CALIBRATION)
def calibrate(
    output: str | Path,
    name: str | None = None,
    resume: bool = False,
    **options: Unpack[CalibrationOptions],
) -> Machine | None:
    """Measure this machine, or the nodes of a job, and write a hardware profile.

    Parameters
    ----------
    output : str or path
        The file of the profile.
    {options}

    Returns
    -------
    Machine or None
        The profile that was written; None on ranks other than 0.

    Raises
    ------
    AxonnTuneError
        An option is wrong, the file cannot be written, or a rank fails.
    """
    journal = Journal.beside(str(output))
    campaign = calibration_campaign(**options)
    request = campaign.request(journal, resume)
    return run_calibration(campaign, request, journal, output, name or Path(output).stem)


def run_calibration(
    campaign: Campaign,
    request: Request,
    journal: Journal,
    output: str | Path,
    name: str,
    command_line: str = "",
) -> Machine | None:
    """Measure what a campaign asks for, and write the profile; None on ranks other than 0."""
    from axonn_tune.runtime.ranks.launch import in_job

    if not in_job():  # Of the ranks of a job only rank 0 can tell, and the others wait for it.
        request.check_store()
    measured = campaign.measure(request)
    if measured is None:
        return None
    profile = campaign.profile(
        measured,
        name,
        preset_machines(),
        command_line=command_line,
        drivers=drivers(),
        environment=relevant_variables(),
    )
    save_yaml(output, profile, PROFILE_HEADER)
    journal.remove()
    return profile


PROFILE_HEADER = "Measured by axonn-tune calibrate; see `calibration` at the end."


def calibration_campaign(
    extent: Extent | None = None, **options: Unpack[CalibrationOptions]
) -> Campaign:
    """Check the options of a calibration and load what they name; see `calibrate`.

    Raises
    ------
    AxonnTuneError
        An option is wrong; the message names it, its value and what is allowed.
    """
    from axonn_tune.calibration.campaign import Campaign, check_dtypes, default_dtypes
    from axonn_tune.runtime.ranks.launch import ranks_or_cores

    given = {**defaults(CALIBRATION), **options}
    machine, model, gpus, device = (given[name] for name in ("machine", "model", "gpus", "device"))
    base = None if machine is None else load_machine(machine)
    dtypes = given["dtype"] or default_dtypes(given["quick"], device)
    check_dtypes(dtypes)
    search = None
    if model is not None and gpus is not None:
        search = build_search(
            model,
            gpus,
            base,
            micro_batch=given["micro_batch"],
            seq_len=given["seq_len"],
            global_batch=given["global_batch"],
            dtype=dtypes[0],
            include_oom=base is None,  # this machine's memory is not known before it is measured
        )
    elif model is not None or gpus is not None:
        raise InputError("--model and --gpus go together: they say which search to measure for")
    return Campaign(
        dtypes=dtypes,
        n_ranks=ranks_or_cores(given["ranks"], device),
        parts=given["only"] or PARTS,
        is_quick=given["quick"],
        base=base,
        search=search,
        most_shapes=given["most_shapes"],
        units=_units(given["levels"]),
        device=device,
        timeout_seconds=given["timeout"],
        quiet=given["quiet"],
        extent=extent,
    )


def _units(text: str | None) -> tuple[int, ...] | None:
    """Read the numbers of ranks of the units of each link level."""
    if text is None:
        return None
    units = [whole_number(unit.strip()) for unit in text.split(",")]
    known = tuple(unit for unit in units if unit is not None)
    if len(known) < len(units):
        raise InputError(
            f"--levels is '{text[:40]}'; allowed: ranks of the units of each level, such as 2,8"
        )
    return known
