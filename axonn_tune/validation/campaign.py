"""A validation from a search to its outcomes; callers run the configurations and keep files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from axonn_tune.search.rank import Ranking
from axonn_tune.spec.measurement import Measurement, Operation
from axonn_tune.spec.validation import Validation
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.timeline import step_timeline
from axonn_tune.validation.outcomes import outcome_of

# What a run measured, or why it failed, by the text of its configuration.
Results = Mapping[str, Measurement | str]


@dataclass(frozen=True)
class ValidationCampaign:
    """Holds configurations of a ranking that shall run, to be compared with predictions.

    n_steps
        Number of training steps of each run.
    device
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    timeout_seconds
        Time after which a collective counts as hung.
    quiet
        Whether to show no progress.
    """

    ranking: Ranking
    chosen: Sequence[Prediction]
    n_steps: int
    device: str
    timeout_seconds: float
    quiet: bool

    @property
    def owner(self) -> dict[str, Any]:
        """What tells this validation from others, for the journal of its results."""
        scenario = self.ranking.search.scenario
        return {
            "model": scenario.model.name,
            "machine": scenario.machine.name,
            "strategy": scenario.strategy.name,
            "engine": scenario.strategy.engine.name,
            "job": asdict(scenario.job),
            "steps": self.n_steps,
        }

    def validation(
        self,
        results: Results,
        command_line: str = "",
        drivers: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Validation:
        """Return what was predicted next to what was measured.

        Parameters
        ----------
        drivers, environment : mappings
            Versions of drivers, and variables of the environment, that the times depend on.
        """
        scenario = self.ranking.search.scenario
        job = scenario.job
        ran = [result for result in results.values() if isinstance(result, Measurement)]
        return Validation(
            model=scenario.model.name,
            machine=scenario.machine.name,
            n_ranks=job.n_gpus,
            global_batch=job.global_batch,
            seq_len=job.seq_len,
            dtype=job.dtype,
            attention=job.attention,
            overlap=str(job.overlap),
            strategy=scenario.strategy.name,
            engine=scenario.strategy.engine.name,
            device=ran[0].device_name if ran else "unknown device",
            backend=ran[0].backend if ran else "unknown backend",
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command_line=command_line,
            n_ranked=len(self.ranking),
            outcomes=tuple(
                outcome_of(prediction, results[str(prediction.configuration)])
                for prediction in self.chosen
            ),
            software={**(drivers or {}), **(ran[0].software if ran else {})},
            environment=environment or {},
        )

    def steps(
        self, results: Results
    ) -> tuple[dict[str, Sequence[Operation]], dict[str, tuple[str, ...]]]:
        """Return the predicted and the measured steps by title, and what operations wait for."""
        steps: dict[str, Sequence[Operation]] = {}
        waits_for: dict[str, tuple[str, ...]] = {}
        for prediction in self.chosen:
            name = str(prediction.configuration)
            predicted = step_timeline(prediction)
            steps[f"{name}: predicted"] = predicted.operations
            waits_for |= predicted.waits_for
            result = results[name]
            if isinstance(result, Measurement):
                steps[f"{name}: measured on rank 0"] = result.last_step
        return steps, waits_for
