"""The JSON contract: predictions, and what they rest on, as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from axonn_tune.report.phrases import batch_remark
from axonn_tune.report.trust import track_record_document
from axonn_tune.search.search import Search
from axonn_tune.step.prediction import Prediction

SCHEMA_VERSION = 1


def assumptions(search: Search) -> dict[str, Any]:
    """Return everything that the numbers rest on."""
    scenario = search.scenario
    job = scenario.job
    machine = scenario.machine
    return {
        "model": scenario.model.name,
        "parameters": scenario.model.parameters,
        "active_parameters": scenario.model.active_parameters,
        "not_modelled": scenario.model.not_modelled or None,
        "gpus": job.n_gpus,
        "machine": machine.name,
        "gpu": machine.gpu.name,
        "peak_flops_per_s": machine.peak_flops_per_s(job.dtype),
        "memory_capacity_bytes": scenario.memory_capacity_bytes,
        "memory_margin_bytes": scenario.memory_margin_bytes,
        "global_batch": job.global_batch,
        "global_batch_tokens": job.tokens,
        "global_batch_remark": batch_remark(search),
        "seq_len": job.seq_len,
        "dtype": job.dtype,
        "precision": job.precision,
        "attention": job.attention,
        "overlap": asdict(scenario.strategy.overlap_of(job)),
        "kernel_tuning": job.kernel_tuning,
        "keep_gathered_weights": job.keep_gathered_weights,
        "dropout": job.dropout,
        "moments": job.moments,
        "optimizer": job.optimizer,
        "muon_mode": job.muon_mode,
        "mtp_modules": job.mtp_modules,
        "adapters": None if job.adapters is None else asdict(job.adapters),
        "frozen": str(job.frozen) or None,
        "samples_per_sequence": job.samples_per_sequence,
        "offload": job.offload,
        "expert_imbalance": job.expert_imbalance,
        "strategy": scenario.strategy.name,
        "orders": list(search.constraints.orders),
        "recompute": list(search.recomputes),
        "cost_model": search.cost_model,
        "track_record": track_record_document(scenario),
        "caveat": scenario.strategy.caveat or None,
    }


def record(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as one entry of ``results``."""
    configuration = prediction.configuration
    low, high = prediction.step_seconds_interval or (None, None)
    memory_low, memory_high = prediction.memory_bytes_interval
    return {
        "rank": prediction.place,
        "strategy": prediction.scenario.strategy.name,
        "has_caveat": bool(prediction.scenario.strategy.caveat),
        "global_batch": prediction.scenario.job.global_batch,
        "grid": dict(configuration.layout.sizes),
        "order": configuration.order,
        "n_virtual": configuration.n_virtual,
        "micro_batch": configuration.micro_batch,
        "n_microsteps": prediction.n_microsteps,
        "recompute": configuration.recompute,
        "step_seconds": prediction.step_seconds,
        "step_seconds_low": low,
        "step_seconds_high": high,
        "p_best": prediction.p_best,
        "compute_seconds": prediction.compute_seconds,
        "exposed_communication_seconds": prediction.exposed_communication_seconds,
        "bubble_seconds": prediction.bubble_seconds,
        "exposed_communication_fraction": prediction.exposed_communication_fraction,
        "tflops_per_gpu": prediction.tflops_per_gpu,
        "hardware_tflops_per_gpu": prediction.hardware_tflops_per_gpu,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "memory_bytes": prediction.memory_bytes,
        "memory_bytes_low": memory_low,
        "memory_bytes_high": memory_high,
        "memory_terms_bytes": dict(prediction.memory_terms_bytes),
        "largest_memory_term": prediction.largest_memory_term,
        "memory_capacity_bytes": prediction.memory_capacity_bytes,
        "host_memory_bytes": prediction.host_memory_bytes,
        "fits": prediction.fits,
        "nearly_fits": prediction.nearly_fits,
        "paper_communication_seconds": prediction.paper_communication_seconds,
    }


def flat_record(prediction: Prediction) -> dict[str, Any]:
    """Return a record without nesting: ``g_x``, ..., ``memory_weights_bytes``, ..."""
    flat: dict[str, Any] = {}
    for key, value in record(prediction).items():
        if key == "grid":
            flat |= {f"g_{axis}": size for axis, size in value.items()}
        elif key == "memory_terms_bytes":
            flat |= {f"memory_{term}_bytes": amount for term, amount in value.items()}
        else:
            flat[key] = value
    return flat
