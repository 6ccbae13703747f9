"""Training: loss curves, mixed precision, checkpoints on other grids, the goldfish loss."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runtime.cases import BATCH, GPT, MODELS
from runtime.ranks import Trained, assert_close, grids, on_grid, on_ranks
from runtime.reference import Reference, whole_parameters

from axonn_tune.errors import AxonnTuneError, FileError, InputError
from axonn_tune.runtime.axonn.checkpoint import load, save
from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.linear import Linear4D
from axonn_tune.runtime.axonn.loss import IGNORED, goldfish_targets
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.trainer import RandomTokens, Trainer
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.layout import grid_layout

LEARNING = {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5}


def trainer_of(ours, micro_batch=None, goldfish=None):
    """A trainer whose step is one micro-step, unless `micro_batch` is given."""
    spec, mesh = ours.model.spec, ours.mesh
    micro_batch = micro_batch or BATCH // (mesh.size("z") * mesh.size("data"))
    text = RandomTokens(spec.vocab_size, spec.seq_len)
    return Trainer(ours.model, ours.optimizer, text, BATCH, micro_batch, goldfish)


def plain_curve(spec, layouts, n_steps, goldfish=None):
    """Losses and gradient norms of the reference under torch's AdamW."""
    plain = Reference(spec, whole_parameters(layouts))
    decayed = [p for name, p in plain.parameters.items() if name.endswith("matrix")]
    others = [p for name, p in plain.parameters.items() if not name.endswith("matrix")]
    adamw = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": LEARNING["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=LEARNING["lr"],
        betas=(0.9, 0.95),
    )
    curve = []
    for step in range(n_steps):
        text = RandomTokens(spec.vocab_size, spec.seq_len).sequences(step, 0, BATCH, "cpu")
        tokens, targets = text[:, :-1], text[:, 1:]
        if goldfish is not None:
            targets = goldfish_targets(tokens, targets, goldfish)
            assert (targets == IGNORED).any()
        loss = plain.loss(tokens, targets)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters.values(), LEARNING["clip_norm"])
        adamw.step()
        curve.append((loss.item(), norm.item()))
    return curve


def check_curves(rank):
    plain = {}
    for grid in (
        grid_layout(1, 1, 1, 4),
        grid_layout(1, 1, 4, 1),
        grid_layout(2, 2, 1, 1),
        grid_layout(1, 2, 2, 1),
    ):
        for name, goldfish in (("gpt", None), ("llama", 3)):
            # Long enough for the goldfish loss, which keeps the first twelve tokens.
            spec = MODELS[name] if goldfish is None else replace(MODELS[name], seq_len=32)
            with on_grid(grid) as mesh:
                ours = Trained(spec, mesh, optimizer=LEARNING)
                layouts = {n: owner.layout for n, owner in ours.owners.items()}
                ours.take(whole_parameters(layouts))
                trainer = trainer_of(ours, micro_batch=2, goldfish=goldfish)
                if name not in plain:
                    plain[name] = plain_curve(spec, layouts, 10, goldfish)
                for index, (loss, norm) in enumerate(plain[name]):
                    step = trainer.step(index)
                    assert step.loss == pytest.approx(loss, rel=1e-4), f"{name} on {grid}"
                    assert step.gradient_norm == pytest.approx(norm, rel=1e-3), f"{name} on {grid}"


@pytest.mark.slow
def test_ten_steps_follow_the_serial_curve():
    on_ranks(4, check_curves)


def check_clipping(rank):
    with on_grid(grid_layout(1, 1, 1, 2)) as mesh:
        ours = Trained(GPT, mesh, optimizer=LEARNING)
        assert trainer_of(ours).step(0).gradient_norm > LEARNING["clip_norm"]
        first_moment = torch.cat(ours.optimizer.states()["exp_avg"])
        # A tenth of the gradient, which AdamW's first update takes in.
        assert first_moment.norm().item() == pytest.approx(0.1 * LEARNING["clip_norm"], rel=1e-4)


def test_the_optimizer_takes_in_a_clipped_gradient():
    on_ranks(2, check_clipping)


def check_bf16(rank):
    wanted = None
    for grid in (
        grid_layout(1, 1, 4, 1),
        grid_layout(2, 2, 1, 1),
        grid_layout(1, 2, 1, 2),
        grid_layout(2, 1, 2, 1),
    ):
        with on_grid(grid) as mesh:
            ours = Trained(GPT, mesh, optimizer=LEARNING, dtype="bf16")
            layouts = {n: owner.layout for n, owner in ours.owners.items()}
            ours.take(whole_parameters(layouts))
            assert ours.optimizer.weights.dtype == torch.bfloat16
            assert ours.optimizer.master.dtype == torch.float32
            trainer = trainer_of(
                ours, micro_batch=BATCH // (grid.size("z") * grid.size("data")) // 2
            )
            wanted = wanted or plain_curve(GPT, layouts, 10)
            for index in range(10):
                step = trainer.step(index)
                # bf16 rounds to 2^-9, and some tens of roundings follow each other.
                assert step.loss == pytest.approx(wanted[index][0], rel=0.02), f"on {grid}"
                assert step.gradient_norm == pytest.approx(wanted[index][1], rel=0.1)
            rounded = ours.optimizer.master.to(torch.bfloat16)
            assert torch.equal(rounded, ours.optimizer.weights)


@pytest.mark.sweep
def test_bf16_with_fp32_master_weights_stays_within_its_rounding():
    on_ranks(4, check_bf16)


def check_save(rank, folder):
    with on_grid(grid_layout(1, 2, 2, 1), "zyxd") as mesh:
        trainer, ours = fresh(mesh)
        curve = [trainer.step(index).loss for index in range(3)]
        save(f"{folder}/saved", ours.model, ours.optimizer, 3)
        curve += [trainer.step(index).loss for index in range(3, 6)]
        torch.save(curve, f"{folder}/curve")


def check_load(rank, folder):
    curve = torch.load(f"{folder}/curve")
    n_ranks = torch.distributed.get_world_size()
    for order, grid in (
        ("xyzd", grid_layout(1, n_ranks, 1, 1)),
        ("dxyz", grid_layout(2, 1, 1, n_ranks // 2)),
    ):
        with on_grid(grid, order) as mesh:
            trainer, ours = fresh(mesh, seed=1)  # other weights than those saved
            step = load(f"{folder}/saved", ours.model, ours.optimizer)
            resumed = [trainer.step(index).loss for index in range(step, 6)]
            assert resumed == pytest.approx(curve[step:], rel=1e-5), f"on {grid}"
            assert step == 3 and ours.optimizer.n_updates == 6
            other = Trained(replace(GPT, hidden_size=64), mesh)
            for path, model in ((f"{folder}/nowhere", ours), (f"{folder}/saved", other)):
                with pytest.raises(FileError) as refused:
                    load(path, model.model, model.optimizer)
                assert "\n" not in str(refused.value) and path in str(refused.value)


def fresh(mesh, seed=0):
    ours = Trained(GPT, mesh, model={"seed": seed}, optimizer=LEARNING)
    return trainer_of(ours), ours


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_same_curve_on_other_grids(tmp_path):
    on_ranks(4, check_save, tmp_path)
    on_ranks(2, check_load, tmp_path)
    on_ranks(4, check_load, tmp_path)


def check_damage(rank, folder):
    path = Path(folder, "saved")
    with on_grid(grid_layout(1, 1, 2, 1)) as mesh:
        trainer, ours = fresh(mesh)

        def saved(step):
            trainer.step(step)
            save(path, ours.model, ours.optimizer, step)
            (shards,) = path.glob("shards-*")
            torch.distributed.barrier()
            return shards

        def assert_loads(step):
            assert load(path, ours.model, ours.optimizer) == step

        def assert_refused(culprit):
            with pytest.raises(FileError, match=f"damaged: {re.escape(culprit)}"):
                load(path, ours.model, ours.optimizer)

        def changed(file, content):
            """Change a file on rank 0, while the others wait; return what stood there."""
            before = file.read_bytes()
            torch.distributed.barrier()
            if rank == 0:
                file.write_bytes(content)
            torch.distributed.barrier()
            return before

        former = {file.name: file.read_bytes() for file in saved(1).iterdir()}
        torch.distributed.barrier()
        shards = saved(2)
        assert_loads(2)
        for file in sorted(shards.iterdir()):
            flipped = bytearray(file.read_bytes())
            flipped[len(flipped) // 2] ^= 1
            for damaged in (bytes(flipped), former[file.name], b""):
                right = changed(file, damaged)
                assert_refused(file.name)
                changed(file, right)
        changed(path / "checkpoint.json", b"{}")
        with pytest.raises(FileError, match=r"checkpoint\.json: .*missing"):
            load(path, ours.model, ours.optimizer)
        saved(3)
        # Whoever is killed while saving leaves shards that no index names.
        (path / f"shards-of-rank-{rank}").mkdir()
        torch.distributed.barrier()
        assert_loads(3)


def test_a_damaged_checkpoint_is_refused_and_an_unfinished_one_does_no_harm(tmp_path):
    on_ranks(2, check_damage, tmp_path)


def check_initial_weights(rank):
    whole = {}
    for grid in (
        grid_layout(1, 1, 1, 4),
        grid_layout(4, 1, 1, 1),
        grid_layout(1, 2, 2, 1),
        grid_layout(1, 1, 4, 1),
    ):
        with on_grid(grid) as mesh:
            ours = Trained(MODELS["llama"], mesh)
            for name, owner in ours.owners.items():
                # The first grid splits nothing.
                first = whole.setdefault(name, owner.shard.detach().clone())
                assert torch.equal(owner.layout.take(first, mesh), owner.shard), f"{name} on {grid}"
    values = whole["blocks.0.qkv.matrix"].double() / 0.02
    assert values.mean().item() == pytest.approx(0.0, abs=4 / values.numel() ** 0.5)
    assert values.std().item() == pytest.approx(1.0, abs=3 / values.numel() ** 0.5)
    assert (values**4).mean().item() == pytest.approx(3.0, abs=0.5)
    assert values.unique().numel() == values.numel()
    assert not torch.equal(whole["blocks.0.qkv.matrix"], whole["blocks.1.qkv.matrix"])


@pytest.mark.slow
def test_every_grid_starts_from_the_same_weights():
    on_ranks(4, check_initial_weights)


def check_evaluation(rank):
    for keep in (False, True):
        with on_grid(grid_layout(1, 1, 2, 1)) as mesh:
            curves = []
            for evaluates in (False, True):
                ours = Trained(GPT, mesh, optimizer=LEARNING, keep_gathered_weights=keep)
                trainer, curve = trainer_of(ours), []
                for index in range(4):
                    curve.append(trainer.step(index).loss)
                    if evaluates:
                        with torch.no_grad():
                            ours.model(torch.zeros(1, 8, dtype=torch.int64))
                curves.append(curve)
            assert curves[0] == curves[1]


def test_evaluation_between_steps_changes_nothing():
    on_ranks(2, check_evaluation)


def check_own_loop(rank):
    """Two layers and an optimizer of torch's own; the gradients of two passes add up."""
    for grid in grids(4):
        with on_grid(grid) as mesh:
            engine = Engine(mesh, kernel_tuning=False)
            up = Linear4D(engine, 16, 32, "up")
            down = Linear4D(engine, 32, 16, "down", transposed=True)
            layers = {"up": up, "down": down}
            owners = {f"{n}.matrix": layer.matrix for n, layer in layers.items()}
            owners |= {f"{n}.bias": layer.bias for n, layer in layers.items()}
            whole = whole_parameters({n: owner.layout for n, owner in owners.items()})
            for name, owner in owners.items():
                owner.shard.data.copy_(owner.layout.take(whole[name], mesh))
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randn(8, 16, generator=generator)
            n_parts = grid.size("z") * grid.size("data")
            rows = tokens.chunk(n_parts)[mesh.batch_index]
            own = rows.chunk(grid.size("x"), dim=-1)[mesh.coordinate("x")]
            for _ in range(2):
                output = down(F.relu(up(own)))
                output.square().sum().backward()

            plain = {name: p.clone().requires_grad_() for name, p in whole.items()}
            hidden = F.relu(tokens @ plain["up.matrix"].flatten(1) + plain["up.bias"].flatten())
            wanted = hidden @ plain["down.matrix"].flatten(1) + plain["down.bias"].flatten()
            (2 * wanted.square().sum()).backward()
            here = wanted.chunk(n_parts)[mesh.batch_index].chunk(grid.size("x"), dim=-1)
            assert_close(
                output.detach(), here[mesh.coordinate("x")].detach(), 1e-5, f"output on {grid}"
            )
            for name, layer in layers.items():
                gradient = layer.matrix.shard.grad.clone()
                torch.distributed.all_reduce(gradient, group=mesh.group("data"))
                part = layer.matrix.layout.take(plain[f"{name}.matrix"].grad, mesh)
                assert_close(gradient, part, 1e-5, f"gradient of {name} on {grid}")


@pytest.mark.slow
def test_layers_in_a_loop_of_ones_own():
    on_ranks(4, check_own_loop)


def check_messages(rank):
    cases = [
        (lambda: Mesh(grid_layout(3, 1, 1, 1)), "grid 3x1x1x1 needs 3 ranks; this job has 2"),
        (lambda: Engine(Mesh(grid_layout(1, 2, 1, 1)), dtype="fp16"), "dtype 'fp16'"),
        (lambda: Linear4D(Engine(Mesh(grid_layout(1, 2, 1, 1))), 8, 9), "8 x 9 does not divide"),
        (lambda: Trained(GPT, Mesh(grid_layout(1, 2, 1, 1)), {"recompute": "some"}), "recompute"),
        (lambda: too_long(Mesh(grid_layout(1, 1, 2, 1))), "at most 8"),
        (
            lambda: trainer_of(Trained(GPT, Mesh(grid_layout(1, 1, 2, 1))), micro_batch=3),
            "multiple of 6",
        ),
        (
            lambda: trainer_of(
                Trained(GPT, Mesh(grid_layout(1, 1, 2, 1)), optimizer={"one_microstep": True}),
                micro_batch=1,
            ),
            "allowed with an optimizer that was made with one_microstep: 1",
        ),
        (lambda: goldfish_targets(torch.zeros(1, 1), torch.zeros(1, 1), 1), "2 or more"),
    ]
    for call, words in cases:
        with pytest.raises(InputError) as refused:
            call()
        assert isinstance(refused.value, AxonnTuneError) and words in str(refused.value)


def too_long(mesh):
    Trained(GPT, mesh).model(torch.zeros(1, 9, dtype=torch.int64))


def test_bad_input_is_named():
    on_ranks(2, check_messages)


def test_goldfish_drops_one_in_k_by_what_stands_before():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 50, (64, 257), generator=generator)
    text[1, 100:200] = text[0, 20:120]
    tokens, targets = text[:, :-1], text[:, 1:]
    kept = goldfish_targets(tokens, targets, 4)
    dropped = kept == IGNORED
    assert torch.equal(kept[~dropped], targets[~dropped])
    assert not dropped[:, :12].any()
    assert dropped[:, 12:].float().mean().item() == pytest.approx(0.25, abs=0.015)
    # Targets that follow the same 13 tokens are dropped or kept alike.
    assert torch.equal(dropped[1, 112:199], dropped[0, 32:119])
    assert not torch.equal(dropped[2], dropped[3])


def check_overlaps(rank):
    """At most two gradients wait with ORS; without it none does."""
    with on_grid(grid_layout(1, 1, 2, 1)) as mesh:
        for overlap, most in ((Overlap(), 2), (Overlap(False, False, False), 1)):
            ours = Trained(GPT, mesh, overlap=overlap)
            scatters, pending = ours.engine.scatters, []
            issue = scatters.scatter

            def counted(*arguments, scatters=scatters, issue=issue, pending=pending):
                issue(*arguments)
                pending.append(len(scatters._in_flight))

            scatters.scatter = counted
            trainer_of(ours).step(0)
            assert max(pending) == (most if overlap.ors else 0)


def test_two_gradients_at_most_wait_for_their_reduce_scatter():
    on_ranks(2, check_overlaps)
