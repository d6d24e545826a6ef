"""Lightning's Trainer: strategy and callback train as the plain loop does, and resume exactly."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

import gradwire
from gradwire.adapters.lightning import LocalSGDStrategy, WireCallback, WireStrategy
from gradwire.testing import run_ranks
from tests.frameworks.lightning_runs import Module, Notes, make_loader, make_trainer
from tests.frameworks.problem import (
    BUCKET_MB,
    NUM_STEPS,
    RECIPE,
    Heard,
    all_equal,
    assert_taken_over,
    damages,
    flat,
    train_plainly,
)

WAYS = {
    "strategy": lambda: (WireStrategy(RECIPE, bucket_cap_mb=BUCKET_MB), []),
    "callback": lambda: ("ddp", [WireCallback(RECIPE)]),
    "local": lambda: (LocalSGDStrategy(period=3, recipe=RECIPE, outer=gradwire.DiLoCo()), []),
}
each_way = pytest.mark.parametrize("way", WAYS)


def fit(rank, way, folder, epochs, callbacks=(), module=None, ckpt_path=None, **options):
    strategy, own = WAYS[way]() if isinstance(way, str) else (way, [])
    trainer = make_trainer(strategy, folder, epochs, callbacks=[*own, *callbacks], **options)
    module = Module() if module is None else module
    trainer.fit(module, make_loader(rank), ckpt_path=ckpt_path)
    return trainer, module


def saving(folder, **options):
    options = {"save_top_k": -1, "filename": "{epoch}", **options}
    return ModelCheckpoint(dirpath=folder, every_n_epochs=1, **options)


def wire_of(trainer):
    own = [callback.wire for callback in trainer.callbacks if isinstance(callback, WireCallback)]
    return own[0] if own else trainer.strategy.wire


def job_bits(rank, folder, way):
    _, module = fit(rank, way, folder, 3)
    buckets = {"bucket_mb": BUCKET_MB} if way == "strategy" else {"bucket_mb": 25}
    assert torch.equal(flat(module), train_plainly(rank, 3, **buckets))
    assert not torch.equal(flat(module), train_plainly(rank, 3, "fp32"))


@pytest.mark.parametrize("way", ["strategy", "callback"])
def test_training_ends_with_the_bits_of_the_plain_loop(two_ranks, tmp_path, way):
    two_ranks.run(job_bits, tmp_path, way)


def job_resume(rank, folder, way):
    _, whole = fit(rank, way, folder, 4)
    fit(rank, way, folder, 2, [saving(folder)], enable_checkpointing=True)
    checkpoint = folder / "epoch=1.ckpt"
    _, resumed = fit(rank, way, folder, 4, ckpt_path=checkpoint)
    assert torch.equal(flat(resumed), flat(whole))
    torch.distributed.barrier()
    if rank == 0:
        for path in sorted((folder / "epoch=1.ckpt.gradwire").iterdir()):
            path.unlink()
        (folder / "epoch=1.ckpt.gradwire").rmdir()
    torch.distributed.barrier()
    with Heard() as heard:
        _, resumed = fit(rank, way, folder, 4, ckpt_path=checkpoint)
    assert not torch.equal(flat(resumed), flat(whole)), "without its state, a run goes on otherwise"
    assert ("it was made without gradwire" in heard.text) == (rank == 0)


@each_way
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_stopped(two_ranks, tmp_path, way):
    two_ranks.run(job_resume, tmp_path, way)


def job_rotation(rank, folder, way):
    fit(rank, way, folder, 3, [saving(folder, save_top_k=1, save_last="link")], enable_checkpointing=True)
    names = sorted(path.name for path in folder.glob("*.ckpt*"))
    assert names == ["epoch=2.ckpt", "epoch=2.ckpt.gradwire", "last.ckpt"]
    assert {p.name for p in (folder / names[1]).iterdir()} == {"rank0.pt", "rank1.pt"}
    trainer, resumed = fit(rank, way, folder, 4, ckpt_path=folder / "last.ckpt")  # a link
    assert wire_of(trainer).stats().num_steps == NUM_STEPS
    _, whole = fit(rank, way, folder, 4)
    assert torch.equal(flat(resumed), flat(whole))


@pytest.mark.parametrize("way", ["strategy", "callback"])
def test_states_are_rotated_with_their_checkpoints(two_ranks, tmp_path, way):
    two_ranks.run(job_rotation, tmp_path, way)


def job_damaged(rank, folder):
    fit(rank, "strategy", folder, 1, [saving(folder)], enable_checkpointing=True)
    checkpoint = folder / "epoch=0.ckpt"
    own = Path(f"{checkpoint}.gradwire")
    for message in damages(rank, own):
        with pytest.raises(ValueError, match=message) as caught:
            fit(rank, "strategy", folder, 2, ckpt_path=checkpoint)
        assert "remove the folder" in str(caught.value)


def test_a_missing_or_foreign_file_is_an_error_on_every_rank(two_ranks, tmp_path):
    two_ranks.run(job_damaged, tmp_path)


def job_other_kind(rank, folder):
    fit(rank, "local", folder, 1, [saving(folder)], enable_checkpointing=True)
    with pytest.raises(ValueError, match="was saved by local SGD, not by a wire"):
        fit(rank, "strategy", folder, 2, ckpt_path=folder / "epoch=0.ckpt")


def test_a_state_of_local_sgd_is_none_of_a_wire(two_ranks, tmp_path):
    two_ranks.run(job_other_kind, tmp_path)


def job_on_one_rank(rank, folder):
    checkpoint = folder / "epoch=1.ckpt"
    strategy = WireStrategy(RECIPE)
    trainer = make_trainer(strategy, folder, 3, devices=1, callbacks=[NoteResidual()])
    trainer.fit(Module(), make_loader(0), ckpt_path=checkpoint)
    assert_taken_over(trainer.callbacks[-1].memory, Path(f"{checkpoint}.gradwire"), rank, num_saved=2)
    assert strategy.wire.stats().num_steps == NUM_STEPS


class NoteResidual(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if not hasattr(self, "memory"):
            self.memory = trainer.strategy.wire.state_dict()["memory"]


def job_two_epochs(rank, folder):
    fit(rank, "strategy", folder, 2, [saving(folder)], enable_checkpointing=True)


def test_another_number_of_ranks_takes_over_what_was_held_back(two_ranks, tmp_path):
    two_ranks.run(job_two_epochs, tmp_path)
    run_ranks(job_on_one_rank, 1, 240, args=(tmp_path,))


def job_logs(rank, folder):
    for way in ("strategy", "callback"):
        notes = Notes()
        fit(rank, way, folder, 2, logger=notes, log_every_n_steps=2)
        (first, *_, last) = [line for line in notes.metrics if "gradwire/bytes_sent" in line]
        assert last["gradwire/total_bytes_sent"] == 2 * NUM_STEPS * last["gradwire/bytes_sent"] > 0
        assert 0 <= last["gradwire/wait_share"] <= 1
        assert {"loss", "gradwire/wait_ms", "gradwire/work_ms"} <= first.keys()
    notes = Notes()
    strategy = WireStrategy(RECIPE, telemetry=gradwire.Telemetry(every=2))
    fit(rank, strategy, folder, 2, logger=notes, log_every_n_steps=2)
    errors = [line["gradwire/relative_error"] for line in notes.metrics if "gradwire/relative_error" in line]
    assert len(errors) == NUM_STEPS
    assert all(0 < error < 1 for error in errors)


def test_figures_go_to_the_trainers_loggers(two_ranks, tmp_path):
    two_ranks.run(job_logs, tmp_path)


def job_options(rank, folder):
    plain = {"bucket_mb": BUCKET_MB}
    _, module = fit(rank, "strategy", folder, 2, accumulate_grad_batches=2, gradient_clip_val=0.01)
    assert torch.equal(flat(module), train_plainly(rank, 2, accumulate=2, clip=0.01, **plain))
    assert not torch.equal(flat(module), train_plainly(rank, 2, accumulate=2, **plain))
    _, module = fit(rank, "strategy", folder, 2, precision="bf16-mixed")
    assert torch.equal(flat(module), train_plainly(rank, 2, dtype=torch.bfloat16, **plain))
    # A scale that changes every other step.
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    _, module = fit(rank, "strategy", folder, 2, plugins=[plugin])
    assert scaler.get_scale() > 1024
    expected = train_plainly(rank, 2, dtype=torch.float16, scaler=other, **plain)
    assert torch.equal(flat(module), expected)


def test_accumulation_clipping_and_mixed_precision_are_those_of_the_plain_loop(two_ranks, tmp_path):
    two_ranks.run(job_options, tmp_path)


def job_compiled(rank, folder):
    # With the default buckets: dynamo asks for a first bucket that is smaller than the others.
    _, module = fit(rank, WireStrategy(RECIPE), folder, 2, module=Module(compiled=True))
    assert torch.equal(flat(module), train_plainly(rank, 2, bucket_mb=25))


def test_compiled_models_train(two_ranks, tmp_path):
    two_ranks.run(job_compiled, tmp_path)


def job_evaluation(rank, folder):
    module = Module()
    stop = EarlyStopping("val_loss", patience=1)
    trainer = make_trainer(WireStrategy(RECIPE, bucket_cap_mb=BUCKET_MB), folder, 9, callbacks=[stop])
    trainer.fit(module, make_loader(rank), make_loader(rank))
    assert trainer.current_epoch == 2, "stopped early"
    assert module.num_validated > 0
    assert torch.equal(flat(module), train_plainly(rank, 2, bucket_mb=BUCKET_MB))
    trainer.validate(module, make_loader(rank))


def test_evaluation_and_early_stopping_change_no_bits(two_ranks, tmp_path):
    two_ranks.run(job_evaluation, tmp_path)


class Failing(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            raise KeyError("an odd batch")


def job_exception(rank, folder, way):
    with pytest.raises(KeyError, match="an odd batch"):
        fit(rank, way, folder, 2, [Failing()])
    _, module = fit(rank, way, folder, 2)
    assert torch.equal(flat(module), train_plainly(rank, 2, bucket_mb=BUCKET_MB if way == "strategy" else 25))


@pytest.mark.parametrize("way", ["strategy", "callback"])
def test_an_exception_in_a_callback_leaves_nothing_behind(two_ranks, tmp_path, way):
    two_ranks.run(job_exception, tmp_path, way)


def job_twice(rank, folder):
    trainer, module = fit(rank, "strategy", folder, 1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, make_loader(rank))
    assert trainer.strategy.wire.stats().num_steps == 2 * NUM_STEPS


def test_a_trainer_can_fit_twice(two_ranks, tmp_path):
    two_ranks.run(job_twice, tmp_path)


def test_hooks_and_wrong_recipes_are_refused_at_once():
    with pytest.raises(ValueError, match="leave ddp_comm_hook out"):
        WireStrategy("int4", ddp_comm_hook=print)
    with pytest.raises(ValueError, match="did you mean 'int4'"):
        WireStrategy("itn4")
    with pytest.raises(ValueError, match="did you mean 'int4'"):
        WireCallback("itn4")


def job_local(rank, folder):
    trainer, module = fit(rank, "local", folder, 2)  # 8 steps: two periods of 3, and 2 steps more
    assert all_equal(flat(module))
    assert wire_of(trainer).stats().num_steps == 3


def test_local_sgd_averages_by_period_and_at_the_end(two_ranks, tmp_path):
    two_ranks.run(job_local, tmp_path)
