"""The page docs/validation.md: predicted against published, with how to read it."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from axonn_tune.cost.gemm import CURVE_ERROR
from axonn_tune.report.engines import stated_facts
from axonn_tune.report.reproduce import (
    COLLECTIVE_HEADERS,
    LINK_HEADERS,
    MEMORY_HEADERS,
    RUN_HEADERS,
    STEP_HEADERS,
    STRATEGY_HEADERS,
    SUMMARY_HEADERS,
    collective_rows,
    comparison_rows,
    link_line,
    memory_rows,
    run_rows,
    step_rows,
    strategy_rows,
    summary_rows,
)
from axonn_tune.reproduce.comparison import FACTS, Comparison, grouped
from axonn_tune.reproduce.reproduction import Reproduction
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.provenance import quantities
from axonn_tune.spec.quantity import ORIGINS
from axonn_tune.step.spread import MODEL_ERROR, UNSTATED_SPREAD


def reproduction_markdown(
    reproduction: Reproduction, machines: Sequence[Machine], engines: Sequence[Engine]
) -> str:
    """Return the page docs/validation.md."""
    results = reproduction.results
    systems = grouped(results, lambda result: result.system).items()
    by_ranks = collective_rows(reproduction, by_ranks=True)
    return "\n\n".join(
        [
            "# Validation: predicted against published",
            _INTRODUCTION,
            "![Predicted over published](validation.png)",
            "## By system",
            _ERRORS_READING,
            _FACTS_READING,
            markdown_table(summary_rows(results), SUMMARY_HEADERS),
            _READING,
            "## By strategy and engine",
            _STRATEGIES_READING,
            markdown_table(strategy_rows(reproduction), STRATEGY_HEADERS),
            "## Measured steps",
            markdown_table(step_rows(reproduction), STEP_HEADERS),
            _STEPS_READING,
            "## Memory of the measured steps",
            markdown_table(memory_rows(reproduction), MEMORY_HEADERS),
            _MEMORY_READING,
            *(paragraph for system, group in systems for paragraph in _of_system(system, group)),
            "## Bandwidth of rings",
            markdown_table(comparison_rows(reproduction.links), LINK_HEADERS),
            f"{link_line(reproduction)}.",
            _RINGS_READING,
            "## Collectives",
            _COLLECTIVES_READING,
            markdown_table(by_ranks, COLLECTIVE_HEADERS),
            "## Free parameters",
            "Numbers that are neither measured nor published, by profile:",
            "\n".join(_parameter_lines(machines)),
            "Numbers of engines; what is fitted predicts no row to which it was fitted:",
            "\n".join(_engine_lines(engines)),
            _FITTED,
            _CHOICES,
            "\n".join(_CONVENTIONS),
        ]
    )


def _of_system(system: str, group: Sequence[Comparison]) -> tuple[str, ...]:
    """Return the paragraphs of one system: its title, its sources and its runs."""
    sources = ", ".join(dict.fromkeys(result.source for result in group))
    return (f"## {system}", f"Sources: {sources}.", markdown_table(run_rows(group), RUN_HEADERS))


_INTRODUCTION = """\
Written by `axonn-tune reproduce --format markdown --output docs/validation.md`; a test
fails when this page and the code disagree. One profile holds for all rows of a machine,
and no constant belongs to a row. `--format csv` prints every row, also of the measured
steps."""

_ERRORS_READING = """An error is predicted over published, minus one. *Pairs in order*: pairs of
configurations that a source compares, of which the prediction has the order right."""

_STRATEGIES_READING = """\
These rows count the end results above and the measured steps below. The *track record*
that rankings state, by engine, family of GPUs and kind (dense, experts, adapters, low
precision), counts those that are times or rates of steps, without the runs to which a
number was fitted."""

_RINGS_READING = """\
Rings inside a node are entries of the profiles and agree by construction; rings across
nodes follow from one bandwidth per machine and the law
beta / min(ranks per node, stride)."""

_CHOICES = """Constants of the algorithm that are choices of a system, not of a machine, stand with
their source in `axonn_tune/strategies/`: gradient buckets, dtypes of gradients and
optimizer states, the bytes of quantised messages."""

_FITTED = fill(
    "Seven numbers of machines are fitted to training steps: `gpu.training_clock_fraction` of "
    "H100, to those of llm-foundry; that of GB200, to four of Megatron-Bridge; that of GH200, to "
    "three of Megatron-Core on Alps, and `kernels.issue_factor` of its host, to three more; what "
    "GB200 and GB300 reach in NVFP4, to nine and to three of Megatron-Bridge; and "
    "`gpu.training_clock_fraction` of MI250X with the software of 2024, to the three runs of "
    "Megatron-DeepSpeed (tables above). They serve for all other rows of those GPUs, AxoNN's among "
    "them. Steps of rings and trees (`ring_steps`, `tree_steps`) are points of measured "
    "collectives: 17 on Frontier, 14 on Perlmutter and 31 on AWS, with two numbers for its "
    "all-to-alls. Those of `frontier-2024` are assumed from them and from the bandwidth that "
    "AxoNN's authors measured; two of its points, for eight rings at once, come from the "
    "breakdown of the run of nanoGPT there, so that this row is not independent. Steps of hops "
    "inside nodes (`hop_steps`) are differences of collectives that were measured on one node. One "
    "switch of an engine is fitted to four rates of 138B: gathers of `deepspeed-2023` hide behind "
    "no kernel.",
    100,
)

_FACTS_READING = fill(
    f"A prediction needs these facts of a run: {', '.join(FACTS)}. A row counts as *known* where "
    "its source states them all, and as *assumed in part* where something near had to be taken for "
    "one of them, because the source is silent or the model cannot express it. The tables name "
    "what was assumed of each run; its other facts are known.",
    100,
)

_COLLECTIVES_READING = """These rows hold how long collectives took against how long they take by
the profiles: across nodes of Frontier with RCCL and of Perlmutter with NCCL (arXiv 2504.18658v2),
across nodes of AWS with NCCL (crazyguitar/aws-gpu-communication-benchmark, CC BY 4.0), and inside a
node from 1 MiB up (aiconfigurator-core 0.12.0). One group of consecutive ranks runs alone. *all*
stands for all machines, kinds or numbers of ranks. Most of these rows are also in the profiles:
those of Frontier and Perlmutter hold steps that were fitted to all rows but the gathers of 64 MiB,
that of AWS steps that were fitted to all gathers and to all-reduces of up to 256 MiB and on rings,
with two numbers for its all-to-alls, and inside a node the profiles hold some of the messages.
Before anybody had looked at the rows of AWS, they were missed by 76 % in the mean: the software of
2024, which `aws-p5-2024` keeps for nanotron's runs, made a step of a ring four times as slow."""

_UNSTATED = ", ".join(
    f"{100 * spread:.0f} % {origin}" for origin, spread in UNSTATED_SPREAD.items()
)
_CONVENTIONS = [
    "Conventions of the intervals and of `P(best)`, which move no prediction",
    "(`axonn_tune/search/uncertainty.py`, `axonn_tune/cost/gemm.py`): spreads of numbers that",
    f"state none, {_UNSTATED}; what the model leaves out,",
    f"{100 * MODEL_ERROR:.0f} % for each candidate; products without measured points, "
    f"{100 * CURVE_ERROR:.0f} %.",
]

_READING = """How to read it: where a source does not say what was run (AxoNN's grids), the best
configuration of the model stands for it; where they ran another, or a shipped profile is too kind
to the machine, the prediction is too fast. SC21's Table 1 is run as its authors' script has it
(NVIDIA/Megatron-LM, examples/sc21 at de7dc40f), with torch's DDP up to 18.4B. Rows marked
`recalled` are from memory and count as hints. Known misses: the two public logs of AxoNN do not
state gradient accumulation (one micro-step is assumed); the batch of Alps' 6144 GPUs is assumed; of
ZeRO++ only the 18B shape is stated, and its larger models, whose rates are alike wherever they ran,
are taken to have one width. Its rates count recomputation, as the logs in DeepSpeed's tutorial do:
without it 18B over one link would have received more than that carries. They show that blocks of
more than a billion elements are gathered 2.67 times in a step in the place of twice, and that
gathers hide behind no kernel, of which the reason is not known: with four links, 1K tokens more
take 138B 14 s with ZeRO-3 and with ZeRO++ alike, in which its FLOPs are done at 82 TFLOP/s, as
products alone take. What was seen in these four rates holds for the 28 others, which are missed by
10 % in the mean and would be predicted 34 % too high if gathers were hidden. What 138B lacks is no
fixed time: ZeRO-3 over four links takes 9 to 12 s longer than predicted, over one link 4 s longer
at most with 2K tokens, and ZeRO++ 4 to 6 s and 1 to 8 s. It is not copies of weights either, since
a gather of one matrix brings it where products read it. Of the sharded
strategies on Frontier no batch or version is known, and quantised messages were slower there than
their bytes say. Rings of RCCL over more than
128 dies of Frontier have the steps of 77 us and more that PCCL's paper measured, while its own runs
of ZeRO-3 on 1,024 dies leave room for 62 us at most; on 2,048 dies these differ by up to 30 % from
their mean. Its authors' logs of early February 2025 (axonn-ai/sc2025-pccl-reproducer, 5a6353f and
30dec9b, jobs 2990832 to 2991516) have steps that depend on the chunk alone, 30 us from 128 to 512
KiB and 34 us at 1 MiB, over 16 to 1,024 dies alike. Rings of AxoNN's runs on Frontier have what
its authors measured of one, two and four that share a node (34, 21 and 10 GiB/s each); their
script of January 2024 has NCCL_NET_GDR_LEVEL commented out beneath the words "super important"
(Megatron-AxoNN, 80def1e), and nanoGPT's leaves it unset. Those logs have twice that bandwidth
with it, and all scripts for Perlmutter set it; a launcher for Frontier of 2025 says of it that it
is twice as fast, but may hang (seal-rg/recurrent-pretraining, 59e0b69). Whether the runs of SC24
on Frontier had it is not known: with it the base run would be 2 % faster, and 80B to 320B 18 to
45 %. At the 21 GiB/s of two rings the gathers and scatters of 160B alone take as long as its
published step (20.6 s), and on any other grid whose X and Y lie within a node, too: either its
rings were faster, or its batch was larger than the 8,192 sequences that are assumed. Import AI
402 says of the paper that Megatron-LM was unstable on Frontier, so that the authors changed to
LitGPT there. It has no dropout, without which the base run is predicted 5 % faster and the others
1 to 2 %; the eager kernels of torch that it has take half of that back from the base, and all
from 160B and 320B. What else differed is not public. SC24's 5B on 512 GPUs of Perlmutter is the
one of its runs there that comes close to the memory: its logits at the loss leave 5 of 40 GiB,
where 10B to 40B leave 12. Whether that is why it was slower than predicted is not known: grids
that split its vocabulary over two or four ranks, which need less memory, are predicted 11 and 3 %
too fast, and not 25. AxoNN's grids are the best by the equations of its papers; those of its
launcher name others for 160B and 320B on Frontier, which are predicted up to 2 % faster. Its
launcher tries powers of two, whose product is never 6144, so that Alps' grid and batch were
chosen in another way. With 9,216 sequences in the place of 6,144 the run is predicted 9 % too
slow, with 12,288 it is predicted 28 % too fast, and so is its base (32 %), by which the
efficiency is met within 4 %. Its script of the runs on 16 GPUs keeps gathered weights where it
overlaps, which is predicted to take 44 GiB; some nodes of Perlmutter have GPUs of 80.
Megatron-DeepSpeed has the layouts, the dropout and the attention of its
public launch scripts. BigScience's runs hung unless the host waited for each kernel, and one ring
between its nodes was measured to get 5.07 GB/s of 50. That the rings of all GPUs of a node share
four times as much is assumed; steps whose replicas sum many gradients are still predicted up to
16 % too fast. One step, of 1,568 sequences, took as long as one of 2,048. MegaScale's parallel
blocks and sliding windows are not modelled; its paper says Ampere, for which A100 stand. The
Megatron-LM beside it takes about 2.2 s of each step whatever
the batch and the number of GPUs, of which half is predicted. torchtitan's own H100 take 500 W in
place of 700; their products are taken to reach 0.6 of the peak, as pytorch/ao says of these GPUs.
Its eight rates on 64 A100, and its nine of 405B on 128 and 512 H100, were predicted before anybody
had looked at them: those on A100 within 4.5 % (2.0 % in the mean), those of 405B without stages 8 %
too low to 9 % too high, and those with stages and whole sequences 7 to 13 % too high. Then its
asynchronous tensor parallelism was given the copies that torch makes for it: the three such rates
of 8B and 70B had been predicted 5 to 15 % too high and are met within 6 %, and two more of 70B,
blind, within 10 %. Where its ranks share sequences, its blocks are compiled, and messages were
taken to travel beside attention, until torch's own trace showed that each is awaited at once: the
rates of 405B had been predicted 17, 16 and 28 % too high and are so by 11, 6 and 18 %. Each step of
attention but the first takes 1.1 to 1.2 times as long as predicted there, on several nodes, and 1.5
times with 4 and 8 ranks of a node (8B), but 0.9 times with 2. Why is not known."""

_STEPS_READING = """*several nodes*: layouts of Megatron-DeepSpeed on A100 that vTrain published
with their times (VIA-Research/vTrain, data/ground_truth_multi.csv, MIT licence); recomputation and
vocabulary are not in its file, and full recomputation and 51200 are taken for all rows. Its file of
one node (ground_truth_single.csv, 1,440 rows) stands in no table here, although it is called
measured, too: it holds what vTrain's own simulator says. Each of its 720 steps without a pipeline
is, to the last of its digits, a sum of a time for each layer of each micro-batch, one for each
micro-batch, one for each layer, a constant, and the all-reduces of vTrain's table (trace/a100): 12,
16 and 20 layers of hidden size 1024 over eight tensor ranks take 124.679104, 164.832784 and
204.986464 ms. *FSDP*: MPT models of llm-foundry (Apache-2.0) on A100 and H100; two numbers of its
engine are fitted to the steps on one node of A100, and then the clock that H100 holds in training
to those on H100. Those of 16 to 64 thousand tokens on H100 are predicted 5 to 11 % too short:
their attention is a kernel in Triton, whose rate was never measured there and is taken from A100.
The torch of a row follows from the date of its commit.
*Alps*: Megatron-Core on 4 to 32 GH200 (three public repositories of a course, 2026). The clock that
GH200 holds in training is fitted to three steps of 8B on one node, and how much longer its host
takes to issue an operation than that of a DGX H100 to three steps of 14B with at most 2,048 tokens;
the other 25 are met within 5.5 % in the mean: 8B on two to eight nodes within 2 %, and models of 70
to 140 billion parameters over four stages within 1 %. Those of 14B and 32B over four tensor ranks
are predicted 2 to 15 % too short. Timers of 32B on two nodes, which nothing is fitted to, tell
where: its forward passes take 169 ms of a micro-step (predicted 170), and its backward passes 326
(294). The messages that travel beside products there would take 30 ms by themselves; that they hide
nothing is not proved. In three of these runs the forward passes wait for the host, 2 to 4 % of the
step, since with this release it waits for the GPU before each micro-step; in the others the GPU
bounds both passes, by the prediction. No attention was measured with heads of 80, which 1.5B and
one of 32B have. *Alps tests*: the rates that CSCS's regression tests expect of 8B on 64, 70B on 128
and Apertus 70B on 2,048 GH200, nothing fitted. At first look 8B was predicted 14.5 % too short,
since its one bucket of all gradients was taken to be reduced beside the backward pass. *NeMo*:
Megatron-Core on DGX H100 in bf16
and, with delayed scales, in 8 bits (NVIDIA/dgxc-benchmarking, Apache-2.0), nothing fitted.
*MLPerf*: submissions in 8 and 4 bits (MLPerf Training v3.0 to v6.0, Apache-2.0), nothing fitted:
GPT-3 on H100, and on B200 before its release; Llama 3.1 8B on H200, and on H100 with a program
whose host waits for the GPU some 200 times in a step, and on B200 to GB300 in CUDA graphs, where no
term knows 0.013 of the 0.09 s of a step on 512 GPUs. Forward passes alone, which the submissions
measured, are met within 3.5 % in the mean there in 8 bits. What is missing from steps on several
nodes is therefore mostly in the rest of the step, and no term knows why: 0.016 of the 0.072 s on
1,024 GB200 are missing, of which each holds 512 tokens. The twelve steps on 8 to 72 GPUs with
products in 4 bits, and most with attention in 8, are met within 3.4 % in the mean. The 16 of Llama
3.1 405B in 8 bits on 256 to 8,192 H100, H200, B200 and GB200 are met within 3 %; at first look they
were within 4 %, since a bucket for each virtual stage was not known. The eight in 4 bits on 512 to
8,192 GB200 and GB300 are met within 3.8 % in the mean. The ten steps of round 6.0, of 8B and 405B
on up to 8,192 GPUs, were predicted within 4.9 % in the mean before anybody had looked at them, and
within 2.8 % without the one on 1,024 GB200. The steps of GPT-3 became 20 % shorter from round 3.0
to round 4.1 on the same GPUs: those of 3.0 are predicted 6 to 8 % too short, those of 4.1 up to 11
% too long. On more than 10,000 GPUs they are predicted 12 to 16 % too long, as if half to three
fifths of what replicas exchange showed in them, where the prediction hides nothing; in those of
405B all of it shows.
*long sequences*: NeMo 24.03 on H100 and 25.04 on B200 in FP8, 4 thousand to a million tokens
(NVIDIA/NeMo, Apache-2.0), nothing fitted. They are met within 8 % on H100 (4.8 % in the mean) and
within 5 % on B200 (2.3 %). They tell that the clock rises where attention rules a step: at that of
other steps those of 128 thousand tokens and more would be predicted 12 to 23 % too slow on either.
*DeepSpeed*: Llama 3.1 8B on one to 32 H100 with optimizer states in the host's memory (arXiv
2506.13996), nothing fitted. 160 thousand to 15 million tokens are met within 7 %: attention alone
then runs at the rate of FlashAttention-2's own benchmark. They are the longest sequences that
fitted, and are predicted to take 62 to 77 of 80 GiB. The three steps with 32 thousand tokens are
predicted 31 to 66 % too short. What is missing is as long with five times the tokens and half as
long on four times the nodes, so that it is the host's work; why it takes 8 s on a node, where
ZeRO-Offload's Adam would take one, is not known. *B200*: Megatron-Core on
one node, whose kernels SimuMax measured one by one (its own prediction: 5.3 % on these rows), also
with experts, and with sequences
of up to 131,072 tokens over eight GPUs by all-to-all; each is the shorter of two steps, nothing is
fitted, and why those with a tensor group or with experts take longer is not known. *LoRA*: Llama
70B with adapters beside frozen weights, as NVIDIA and others fine-tune it for MLPerf (H100 to
GB300) and with Megatron-Bridge. What these runs do and no prediction does is to store activations
in 8 bits. The same layouts took up to 18 % less time in MLPerf's next round, with newer software.
Of those whose layers are split over eight H100 or H200 some record no CUDA graph, and the host
bounds them: the time in which it issues an operation is fitted to NVIDIA's two of round 4.0, and
meets the other four on H100 within 6 %; on 512 H200 of Oracle the host takes a fifth longer.
Nothing else is fitted. Four steps on 4 to 32 GH200 with Slingshot, on Isambard-AI, to which no
profile had been held before, were predicted 6 to 10 % too short at first look. The nine steps on
others' systems that no host bounds were predicted within 8 % before anybody had looked at them,
except for one on 512 H200 (14 % too short). *on AMD*: 22 steps of AMD and seven others on MI300X to
MI355X (MLPerf Training v5.0 and v5.1), nothing fitted. They are the first that the profiles of
these GPUs were held to. Before anybody had looked at them they were predicted within 7.7 % in the
mean, those on MI300X 11 to 21 % too fast: products in 8 bits were taken to reach the share of the
peak that those in bf16 were measured to reach. They have the rates now that AMD measured itself
(ROCm/rocm-blogs): on MI325X of normally distributed numbers, whose steps are met within 3 %, and on
MI300X of structured ones, less the 7 % that these gained on MI325X. Those on MI300X are still
predicted 5 to 15 % too fast, and those on MI350X, of whose products nothing is measured, 6 to 11 %.
The 192 GiB of an MI300X make its submissions recompute 21 of 80 layers, which larger GPUs need not;
186 GiB are predicted with these, and 223 without. *NeMo releases*: NeMo 24.07 on H100 and NeMo
25.04 and 25.07 on GB200, in 8 bits (NVIDIA/NeMo, Apache-2.0); nothing fitted. *Megatron-Bridge*:
Megatron-Core on H100 to GB300, mostly in 8 and 4 bits (NVIDIA-NeMo/Megatron-Bridge, Apache-2.0), as
its releases from 25.11 to 26.08 measured it. The host's times for experts are fitted to five of its
steps, the clock that GB200 holds in training to the four of Llama 3 70B in MXFP8, and what they
reach in NVFP4 to the nine of Llama 3 70B and 405B on GB200 and to the three of 70B on GB300.
Nothing else is fitted to the 85 steps of Llama 3.1 405B, Qwen3 235B-A22B, Kimi K2 and GPT-OSS 120B.
Before anybody had looked at them, they were predicted within 4.2 % (405B in 8 bits), 18.5 % (405B
in NVFP4), 11.2, 1.6 and 35.7 % in the mean. Since then GPT-OSS has the kernels that nothing fuses
for it, counted in the code, and windows as they were measured. Torch's kernels which broadcast an
operand or read a slice take the time that one of them took on an H200, by the multiprocessors and
the clock of other GPUs. With all this its 25 steps are met within 4.6 % in the mean, and nothing is
fitted to them; those on 64 B300 over InfiniBand are the worst (-30 %), whose exchange took as long
as on B200 with half the links.
*Megatron-FSDP*: Llama 3 70B and 8B in 8 bits on 64 GB200 and GB300 and on 8 H100, as NVIDIA's
releases for Megatron-Bridge and NeMo measured it (both Apache-2.0). Nothing is fitted, and the
recipes' numbers of layers in the host's memory are predicted, too. The 15 steps were predicted
before anybody had seen an error, within 13 % (6.9 % in the mean); nothing that moves a time was
changed since. All but one are predicted too long, those of the latest releases most, as are those
of 405B in the same format with Megatron-Core. Copies to and from the host are taken to slow kernels
as collectives do, which was not measured: without it 70B with two sequences at a time would be
predicted 4 % shorter on GB200, and 2 % on GB300.
*Model Zoo*: steps of Qwen3 235B-A22B with Megatron-Core on 64 to 256 GPUs (yanring/Megatron-
MoE-ModelZoo, MIT); nothing is fitted to them. Before anybody had looked at them, they were
predicted within 10.9 %. Then the host's time for experts became two numbers instead of one,
which was chosen with these rows in sight, too. Where tokens travel beside another micro-batch,
steps on H100, and on GB300 with one sequence at a time, take up to a third longer than
predicted. The host seems to limit them, since CUDA graphs of the router alone made one of them
14 % shorter. Where nothing travels beside another micro-batch, such graphs of parts of a layer
make the predicted time of the host too long (GB200). Why 32 stages of one layer take longer
than predicted is not known.
*MLPerf experts*: DeepSeek-V3 in MXFP8 on 256 to 8,192 GPUs and GPT-OSS 20B on 8 to 512
(mlcommons/training_results_v6.0, Apache-2.0); nothing is fitted to these 17 steps, whose experts
are chosen by a real router. The first seven of GPT-OSS 20B were predicted within 12.1 % before
anybody had looked at them, and the one on 512 GPUs was 30 % too short. Then rings that leave a rack
were given the measured steps of the hops inside it. The eighth, on 64 B300, was predicted within 1
% at first look. Those of DeepSeek-V3 were at first predicted within 16.0 %, and 36 % too fast on
8,192 GPUs. Then the first micro-batch was made to wait in each stage for the weights that
Megatron-Core starts to gather when it arrives. From 2,048 GB200 on, a step still takes 0.8 to 1.5 s
longer than predicted, however many micro-steps it has. On GB300 of CoreWeave it is the other way
round: on 4,096 and 8,192 a step is predicted 0.3 and 0.6 s too long, most of which the wait for
weights adds, while that on 2,048 is met within 6 %. The scripts for GB300 run the head in MXFP8,
too, which was not predicted at first: with a head in bf16 the step on 256 GB300 would take 6 %
more. The gathers and reductions of experts between racks, and the first and the last passes, during
which no other micro-batch hides an exchange, make up that part of a step. A trace of one step would
tell how long each takes.
*AutoModel*: six steps of mixtures of experts with FSDP2, DeepEP and bf16 states on 8 to 256 H100,
and one of Llama 3 70B of which two ranks share a sequence (NVIDIA-NeMo/Automodel, Apache-2.0);
nothing is fitted. The first three with experts were predicted 10 to 12 % too slow as if a router
had chosen the experts. Then its gate was read, which stands in for a router and gives each token
neighbouring experts, which one or two ranks hold. With a router's choices the six steps would be
predicted 7 to 34 % longer. What remains is of both signs. GPT-OSS 20B is the one that is predicted
too slow; its biases, which are counted kernel by kernel, take a fifth of its step. On several nodes
messages of 6 KB may be slower than those of 14 KB at which DeepEP was measured.
*KempnerForge*: Llamas of 8, 15 and 71 billion parameters on 1 to 32 H200 with FSDP2 and DTensor's
tensor parallelism (KempnerInstitute/KempnerForge, MIT), nothing fitted. Its nodes have four GPUs
and InfiniBand of 400 Gbit/s; that two GPUs share an adapter is assumed after the rates in a trace,
which is no row. Boards of four GPUs have no switch, so that a pair shares a third of its links. The
two steps whose tensor groups are pairs are predicted 4 and 11 % too fast, and the others are met
within 8 %. Their memory is met within 14 %.
*nanotron*: layouts of tensor, pipeline and data parallelism on H100 from the Ultra-Scale Playbook
(Apache-2.0); two numbers of its engine are fitted to the steps of 1B on up to 16 nodes, which also
show that a stage closes when it has exactly its share of the products. Its copies and its gate are
counted in torch's kernels, and what it reduces and gathers, and when, is read in its code. With
sharded states its host copies each replica's part of each weight by itself, for which 9 us are
assumed, not fitted. Steps of gathers between its nodes are those of 256 MB, which its authors
measured. Runs on 64 nodes, where without a pipeline the source's own times scatter up to ten times,
have groups of their own. On up to 16 nodes 51 runs took at least 0.4 s longer, for each slot of
their pipeline, than another run of the same model and tensor group that has no less to do in a
slot: no more stages, and no smaller micro-batch. They lost 0.57 s with two stages and 1.01 s with
more, in the median. On 64 nodes 78 runs did, by 0.55 and 0.87 s: of those with a pipeline and at
most 16 tensor ranks, all but 2. A revision of nanotron that has the script of these runs (67c5ebb6,
December 2024) would explain it: it sleeps 0.1 s between looks at whether a message of shapes has
passed (pipeline_parallel/p2p.py), and six of these belong to each micro-batch between two stages.
Of the 64 runs of stages with 32 tensor ranks all seem to have slept, so that none is left to be
compared with: the fastest slots with twice the stages take 0.87 of the time, as those of runs that
slept (0.99) and not 0.54 as the others. Which runs that revision made is not written anywhere, so
that no prediction of time can know it. *all not set apart* leaves these 193 out, by a rule that
looks at no prediction; all other rows keep them. Among them are all 10 runs that took ten times as
long as the same layout with the other stage of ZeRO; without these 10 alone, Spearman within jobs
is 0.842.
*near*:
steps that took at most twice as long as the fastest of their job, among which people choose.
*naive*: FLOPs at one fraction of the peak, fitted to the very rows of a table, times the bubble.
*Spearman*: over all rows of a group, and within each job of three layouts or more, mean over
jobs. *pairs in order*: pairs of layouts of one job whose order is right, of those whose steps
differ. *regret*: how much slower the layout that is predicted to be the fastest is than the
fastest measured one, over jobs (same model, GPUs, batch and precision). For comparison, on
vTrain's whole set of 109 rows on several nodes, of which these are a part: Calculon 15.3 %,
vTrain's own claim 14.7 %."""


_MEMORY_READING = """All of these steps ran. An error is what the allocator was predicted to hold
over what was measured, minus one: on the fullest GPU, or in the first stage of a pipeline where
nanotron ran, which writes down the memory of rank 0 alone (helpers.py, write_to_csv). Its number
must be what the allocator has reserved when the third step ends: peaks are reset after the passes
of a step (log_memory), so that what was allocated could not grow with the micro-batch, as the
number does. But for one number of nanotron nothing is fitted: an engine's file counts the bytes in
its code. Without the assumed fragmentation, what Megatron-Core allocates on B200 is met within
0.5 % in the mean (a test holds it). nanotron's rows scatter: layouts that differ in their number of
replicas only, and that must hold the same, were measured 4 % from their median in the mean, and up
to 78 % apart. What its allocator keeps beside its tensors (strategies/segments.py) was found by
replaying the allocations of its first steps through a model of PyTorch's allocator. That replay
meets the 17 runs without tensor and pipeline parallelism within 0.2 GiB, but for one. The allocator
also holds what it has reserved for tensors that are gone, but that the GPU has yet to reduce and
scatter: 53 of them, where the host is a full queue of launches ahead. It is taken to be so without
a pipeline, and in a stage whose kernels take longer than its host. The revisions of nanotron that
are public would make the host of a stage wait for each message (pipeline_parallel/p2p.py at
e24d2483 and 67c5ebb6), so that it could hold the tensors of two passes at most. But of the 46 runs
with at least eight stages, more micro-batches than stages, and such kernels that are not set apart,
45 hold more, and the median is 67: their hosts cannot have waited. In all other stages the first
one holds the tensors of the forward passes that come before the first backward pass, but for two.
No code says why; the two are fitted to 183 runs of 1B, whose mean error is 5.8 % (10.1 % without),
and the runs of 8B are met within 6.4 % instead of 11.3 %. The hosts of runs that are set apart are
taken to wait. Whether the host was ahead is what is known least: runs were measured that hold all
of these tensors, and others of the same kind that hold none. Without stages the median error is
3.6 %, and 4.4 % with stages; without all that is kept beside the tensors it would be 19.5 % where
there are no stages. With stages it is 5.1 % for the 193 runs that are set apart, and 3.8 % for the
others. Most of what is left without stages are 39 runs that took more than 1.5 times as long as
predicted: they hold nearly nothing back, and are predicted 37 % too full in the mean. One
layout of 8B stands in its table twice: 19.0 s with 19.2 GiB, and 88.9 s with 17.8 GiB. The nine
runs that reserved 70 GiB or more took 2.7 to 7.7 times as long as predicted; five of them are set
apart, and the others have no faster run of their kind beside them. Megatron-Bridge publishes no
memory: its rows only say whether what ran was predicted to fit."""


def markdown_table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _parameter_lines(machines: Sequence[Machine]) -> list[str]:
    lines = []
    for machine in machines:
        named = list(quantities(machine))
        counts = {origin: sum(q.origin == origin for _, q in named) for origin in ORIGINS}
        assumed = ", ".join(f"`{name}` = {q.value:g}" for name, q in named if q.origin == "assumed")
        lines.append(
            f"- **{machine.name}**: {counts['measured']} measured, "
            f"{counts['published']} published, {counts['assumed']} assumed: {assumed}; "
            f"{len(machine.gemm.tiles)} GEMM tiles with assumed relative speeds"
        )
    return lines


def _engine_lines(engines: Sequence[Engine]) -> list[str]:
    """Return a line for each number of each engine, with its origin and source."""
    return [
        f"- **{engine.name}**: `{fact.name}` = {fact.value}, {fact.origin}: {fact.source}"
        for engine in engines
        for fact in stated_facts(engine)
        if fact.origin
    ]
