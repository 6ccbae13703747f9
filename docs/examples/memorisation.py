"""Train GPTs on documents that come 0, 1, 4 or 16 times, and count which they know by heart.

The models differ in their hidden size, and each is trained with and without the goldfish loss. This
command trains all of them on four ranks of one machine::

    torchrun --nproc-per-node 4 memorisation.py --grid 1x2x2x1 --output memorisation.csv
"""

import argparse
import os
import sys
from datetime import date
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist

from axonn_tune import __version__
from axonn_tune.report.figure import figure_bytes, new_figure
from axonn_tune.report.validation_page import markdown_table
from axonn_tune.runtime import (
    GPT,
    Engine,
    Mesh,
    Optimizer,
    Trainer,
    joined,
    parse_layout,
    pick_device,
    place_in_job,
)
from axonn_tune.spec.model import Model

N_WORDS = 256  # words of the made-up language
N_FOLLOWERS = 4  # words that may follow a word, all with the same chance
SEQ_LEN = 32
N_CONTINUED = 16  # words of a document that a model must continue with, given the ones before
REPETITIONS = (0, 1, 4, 16)
BATCH = 4  # sequences in one step


class Corpus:
    """Text of a made-up language: passages that come once, then documents that come again.

    A word has `N_FOLLOWERS` followers with equal chances. So nobody can guess how a document goes
    on, and a model that continues one to its end has learnt it by heart.

    Parameters
    ----------
    n_documents : int
        Number of documents for each of `REPETITIONS`.
    n_passages : int
        Least number of passages, from which a model learns the language; a few more fill the last
        batch.
    seed : int

    Attributes
    ----------
    documents : dict of int to int64 tensor, shape (n, s + 1)
        The documents by their number of repetitions.
    """

    def __init__(self, n_documents: int, n_passages: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._followers = torch.randint(N_WORDS, (N_WORDS, N_FOLLOWERS), generator=generator)
        self.documents = {n: self._passages(n_documents, generator) for n in REPETITIONS}
        copies = torch.cat([text.repeat(n, 1) for n, text in self.documents.items()])
        shuffled = copies[torch.randperm(len(copies), generator=generator)]
        n_passages += -(n_passages + len(copies)) % BATCH
        self._sequences = torch.cat((self._passages(n_passages, generator), shuffled))
        self.n_steps = len(self._sequences) // BATCH

    def _passages(self, count: int, generator: torch.Generator) -> torch.Tensor:
        words = [torch.randint(N_WORDS, (count,), generator=generator)]
        for _ in range(SEQ_LEN):
            choices = torch.randint(N_FOLLOWERS, (count,), generator=generator)
            words.append(self._followers[words[-1], choices])
        return torch.stack(words, dim=1)

    def sequences(self, step: int, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Return sequences `first` to `first + count` of a step's batch, shape (count, s + 1)."""
        start = step * BATCH + first
        return self._sequences[start : start + count].to(device)


def known_words(model: GPT, documents: torch.Tensor) -> torch.Tensor:
    """Tell for each of a document's last words whether the model puts it first.

    A greedy continuation repeats the document exactly if and only if all of them are put first: up
    to the first wrong word the model has read the same words as here.

    Parameters
    ----------
    documents : int, shape (n, s + 1)

    Returns
    -------
    bool, shape (n, N_CONTINUED)
    """
    mesh = model.engine.mesh
    with torch.no_grad():
        part = model(documents[:, :-1])[:, -N_CONTINUED:].contiguous()
    parts = [torch.empty_like(part) for _ in range(mesh.size("y"))]
    dist.all_gather(parts, part, group=mesh.group("y"))
    return torch.cat(parts, dim=-1).argmax(-1) == documents[:, -N_CONTINUED:]


def study(
    mesh: Mesh, hidden_size: int, goldfish: int | None, corpus: Corpus, seed: int, lr: float
) -> list[dict[str, object]]:
    """Train one model on a corpus; return a row of results for each number of repetitions."""
    spec = Model(f"gpt-{hidden_size}", 2, hidden_size, 4, N_WORDS, SEQ_LEN)
    model = GPT(Engine(mesh, kernel_tuning=False), spec, seed=seed)
    optimizer = Optimizer(model, model.engine, lr=lr)
    micro_batch = max(BATCH // (mesh.size("z") * mesh.size("data")), 1)
    trainer = Trainer(model, optimizer, corpus, BATCH, micro_batch, goldfish)
    for step in range(corpus.n_steps):
        trainer.step(step)
    rows: list[dict[str, object]] = []
    for repetitions, documents in corpus.documents.items():
        known = known_words(model, documents.to(mesh.device))
        rows.append(
            {
                "hidden_size": hidden_size,
                "parameters": int(spec.parameters),
                "loss": f"goldfish, k = {goldfish}" if goldfish else "all words",
                "seed": seed,
                "repetitions": repetitions,
                "documents": len(documents),
                "exact_matches": known.all(dim=1).sum().item(),
                "known_words_percent": 100 * known.double().mean().item(),
            }
        )
    return rows


def exact_match_percent(results: pd.DataFrame) -> pd.DataFrame:
    """Return the exact-match rate over all seeds: a row for a model, a column for repetitions."""
    sums = results.pivot_table(
        index=["loss", "parameters"],
        columns="repetitions",
        values=["exact_matches", "documents"],
        aggfunc="sum",
    )
    return 100 * sums["exact_matches"] / sums["documents"]


def table(results: pd.DataFrame) -> str:
    """Return the exact-match rates as a table in Markdown."""
    rates = exact_match_percent(results)
    headers = ["loss", "parameters", *(f"{n}x" for n in rates.columns)]
    rows = [
        [loss, f"{parameters:,}", *(f"{rate:.1f} %" for rate in line)]
        for (loss, parameters), line in zip(rates.index, rates.to_numpy(), strict=True)
    ]
    return markdown_table(rows, headers)


def draw(results: pd.DataFrame, path: str) -> None:
    """Draw the exact-match rates over the repetitions, the goldfish loss on the right."""
    rates = exact_match_percent(results)
    figure, both = new_figure(1, 2)
    for axes, (loss, of_loss) in zip(both, rates.groupby(level="loss"), strict=True):
        for parameters, line in of_loss.droplevel("loss").iterrows():
            label = f"{parameters:,} parameters"
            axes.plot([str(n) for n in line.index], line, marker="o", label=label)
        axes.set(title=loss, xlabel="repetitions of a document", ylabel="exact matches, %")
        axes.set_ylim(-3, 103)
        axes.legend()
    Path(path).write_bytes(figure_bytes(figure, path))


def read_command_line() -> argparse.Namespace:
    """Return the options of the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", default="1x1x1x1", help="G_x x G_y x G_z x G_data")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--goldfish", type=int, default=3, help="drop one word in so many")
    parser.add_argument("--documents", type=int, default=32, help="for each number of repetitions")
    parser.add_argument("--passages", type=int, default=1600, help="that are read first, once each")
    parser.add_argument("--output", default="memorisation.csv", help="file for the results")
    parser.add_argument("--plot", help="file for a figure (.png, .svg or .pdf)")
    return parser.parse_args()


def train_all(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, object]]:
    """Train every model that the options ask for; return the results of all."""
    mesh = Mesh(parse_layout(arguments.grid), device=device)
    rows = []
    for seed in arguments.seeds:
        corpus = Corpus(arguments.documents, arguments.passages, seed)
        for hidden_size in arguments.hidden_sizes:
            for goldfish in (None, arguments.goldfish):
                rows += study(mesh, hidden_size, goldfish, corpus, seed, arguments.lr)
                if dist.get_rank() == 0:
                    loss = rows[-1]["loss"]
                    print(f"trained: hidden size {hidden_size}, {loss}, seed {seed}", flush=True)
    return rows


def main() -> None:
    """Join the other ranks, train, and let rank 0 write the results."""
    arguments = read_command_line()
    place = place_in_job(os.environ)
    if place is None:
        sys.exit("start me with torchrun or srun")
    device = pick_device("auto", place)
    with joined(place, device, timeout_seconds=300):
        rows = train_all(arguments, device)
    if place.rank == 0:
        results = pd.DataFrame(rows).assign(
            lr=arguments.lr,
            grid=arguments.grid,
            date=date.today().isoformat(),
            torch=torch.__version__,
            axonn_tune=__version__,
        )
        results.to_csv(arguments.output, index=False)
        print(table(results))
        if arguments.plot:
            draw(results, arguments.plot)


if __name__ == "__main__":
    main()
