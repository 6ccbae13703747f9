"""Searches with offload: what is refused, what fits then, and what the memory of a host lacks."""

from dataclasses import replace

import pytest

from axonn_tune.api.comparing import comparison
from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.io.presets import load_machine
from axonn_tune.search.one_layout import why_not
from axonn_tune.search.rank import HOST_MEMORY_REASON, rank_candidates

GIB = 2**30
# 20B parameters on 8 A100 of 40 GB: 40 GB of states for each GPU, or 160 GB for each host.
LARGE = {"strategy": "zero3", "global_batch": 64}


def search_of(offload="optimizer", model="20b", gpus=8, machine="perlmutter", **options):
    return build_search(model, gpus, machine, offload=offload, **{**LARGE, **options})


def with_memory(nbytes):
    """Perlmutter with another memory of each host."""
    machine = load_machine("perlmutter")
    memory = replace(machine.host.memory_bytes, value=nbytes)
    return replace(machine, host=replace(machine.host, memory_bytes=memory))


def test_what_offload_makes_fit_is_said_where_nothing_fits():
    with pytest.raises(
        NoCandidateError, match=r"fits on no grid .*; with --offload optimizer it fits"
    ):
        rank_candidates(search_of("none"))
    assert rank_candidates(search_of()).fits.all()


@pytest.mark.parametrize(
    "refused",
    [
        {"machine": "jean-zay"},
        {"engine": "deepspeed-2021"},
        {"frozen": "embedding,layers:0-1,head"},
        {"moments": "bf16", "strategy": "megatron"},
    ],
)
def test_it_is_not_said_where_it_cannot_be_done(refused):
    with pytest.raises(NoCandidateError) as error:
        rank_candidates(search_of("none", model="80b", **refused))
    assert "offload" not in str(error.value)


def test_a_node_that_lacks_memory_is_named():
    """16 bytes of each of 20.1 billion parameters, on two nodes."""
    needed = rank_candidates(search_of()).prediction(0).host_memory_bytes
    assert needed == pytest.approx(16 * 20.11e9 / 2, rel=1e-3)
    message = (
        rf"with --offload optimizer: the smallest needs {needed / GIB:.1f} GiB of the 100.0 GiB"
    )
    with pytest.raises(NoCandidateError, match=message):
        rank_candidates(search_of(machine=with_memory(100 * GIB)))


def test_layouts_that_the_host_s_memory_rules_out_are_counted_and_shown_on_request():
    """Four ranks of a node hold 16 bytes of 5.05 billion parameters over the shards: 323 GB / s."""
    ranking = rank_candidates(search_of(model="5b"))
    assert {p.layout.size("shard") for p in ranking.top()} == {2, 4, 8}
    assert ranking.rejected[HOST_MEMORY_REASON] > 0
    every = rank_candidates(search_of(model="5b", include_oom=True))
    assert {p.layout.size("shard") for p in every.top() if not p.fits_in_host} == {1}
    assert not any(p.fits for p in every.top() if not p.fits_in_host)


def test_why_a_layout_is_not_ranked():
    reason = why_not(search_of(machine=with_memory(100 * GIB)), "shard=8")
    assert "out of the host's memory; a node needs 149.9 GiB of 100.0 GiB" in reason


def test_a_machine_without_a_host_is_refused():
    with pytest.raises(InputError, match="machine 'jean-zay' has no facts for --offload"):
        search_of(machine="jean-zay")


def test_a_word_that_names_nothing_is_refused():
    with pytest.raises(InputError, match="offload is 'weights'; allowed: none, optimizer"):
        search_of("weights")


def test_an_engine_that_cannot_offload_is_refused_and_the_others_compared():
    with pytest.raises(NoCandidateError, match=r"AxoNN 0\.2\.0 keeps optimizer states on"):
        rank_candidates(search_of(strategy="axonn", engine="axonn"))
    bests = {
        best.search.scenario.strategy.name: best
        for best in comparison("5b", 8, "perlmutter", global_batch=64, offload="optimizer").best
    }
    assert bests["megatron"].prediction is not None and bests["zero3"].prediction is not None
    assert "keeps optimizer states on the GPU" in bests["axonn"].reason


def test_only_zero_s_family_keeps_gradients_in_the_host_s_memory(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntitle: Mine\nstrategies: [megatron]\noffload: {gradients: true}\n")
    with pytest.raises(InputError, match=r"mine: offload\.gradients is true; allowed: only for"):
        search_of(strategy="megatron", engine=str(path))
