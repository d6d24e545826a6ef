"""The Trainer of Transformers: `attach` trains as the plain loop does, and resumes exactly."""

import shutil

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

import gradwire
from gradwire.adapters.transformers import attach, attach_local_sgd
from gradwire.testing import run_ranks
from tests.frameworks.problem import (
    BATCH,
    NUM_STEPS,
    RECIPE,
    Heard,
    all_equal,
    assert_taken_over,
    damages,
    flat,
    make_optimizer,
    make_rows,
    set_torchrun_variables,
    train_plainly,
)
from tests.frameworks.trainer_runs import InOrder, Model


def make_trainer(folder, epochs, way="wire", callbacks=(), **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=options.pop("find_unused", False),
        disable_tqdm=True,
        label_names=["rows"],  # so that evaluation has a loss
        **{"max_grad_norm": 0.0, "save_strategy": "no", "logging_strategy": "no", "report_to": [], **options},
    )
    model, data = Model(), [{"rows": row} for row in make_rows()]
    optimizers = (make_optimizer(model), None)
    trainer = InOrder(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data,
        optimizers=optimizers,
        callbacks=list(callbacks),
    )
    if way == "wire":
        return trainer, attach(trainer, RECIPE)
    return trainer, attach_local_sgd(trainer, period=3, recipe=RECIPE, outer=gradwire.DiLoCo())


def train(*args, checkpoint=None, **options):
    trainer, _ = make_trainer(*args, **options)
    trainer.train(resume_from_checkpoint=checkpoint)
    return flat(trainer.model)


def plain(rank, epochs, **options):
    return train_plainly(rank, epochs, bucket_mb=25, **options)


def job_bits(rank, folder):
    trainer, wire = make_trainer(folder, 3)
    trainer.train()
    assert torch.equal(flat(trainer.model), plain(rank, 3))
    assert wire.stats().num_steps == 3 * NUM_STEPS


def test_training_ends_with_the_bits_of_the_plain_loop(two_ranks, tmp_path):
    two_ranks.run(job_bits, tmp_path)


def job_resume(rank, folder, way):
    whole = train(folder / "whole", 4, way)
    train(folder, 2, way, save_strategy="epoch")
    checkpoint = folder / f"checkpoint-{2 * NUM_STEPS}"
    assert torch.equal(train(folder, 4, way, checkpoint=str(checkpoint)), whole)
    assert torch.equal(train(folder, 4, way, checkpoint=True), whole)
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(checkpoint / "gradwire")
    torch.distributed.barrier()
    with Heard() as heard:
        assert not torch.equal(train(folder, 4, way, checkpoint=str(checkpoint)), whole)
    assert ("it was made without gradwire" in heard.text) == (rank == 0)


@pytest.mark.parametrize("way", ["wire", "local"])
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_stopped(two_ranks, tmp_path, way):
    two_ranks.run(job_resume, tmp_path, way)


def job_save(rank, folder):
    set_torchrun_variables()
    train(folder, 1, save_strategy="epoch")


class NoteMemory(TrainerCallback):
    """Notes what a resumed run holds back before its first step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if not hasattr(self, "memory"):
            self.memory = self.wire.state_dict()["memory"]


def job_take_over(rank, folder):
    (checkpoint,) = folder.glob("checkpoint-*")
    note = NoteMemory()
    trainer, note.wire = make_trainer(folder, 3, callbacks=[note])
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert_taken_over(note.memory, checkpoint / "gradwire", rank, num_saved=3)
    assert all_equal(flat(trainer.model))


def test_another_number_of_ranks_takes_over_what_was_held_back(two_ranks, tmp_path):
    run_ranks(job_save, 3, 240, args=(tmp_path,))
    two_ranks.run(job_take_over, tmp_path)


def job_rotation(rank, folder):
    train(folder, 3, save_strategy="epoch", save_total_limit=2)
    torch.distributed.barrier()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("rank*.pt"))
    assert files == sorted(f"checkpoint-{n * NUM_STEPS}/gradwire/rank{r}.pt" for n in (2, 3) for r in (0, 1))


def test_states_are_rotated_with_their_checkpoints(two_ranks, tmp_path):
    two_ranks.run(job_rotation, tmp_path)


def job_damaged(rank, folder):
    train(folder, 1, save_strategy="epoch")
    checkpoint = folder / f"checkpoint-{NUM_STEPS}"
    for message in damages(rank, checkpoint / "gradwire"):
        with pytest.raises(ValueError, match=message):
            train(folder, 2, checkpoint=str(checkpoint))


def test_a_missing_or_foreign_file_is_an_error_on_every_rank(two_ranks, tmp_path):
    two_ranks.run(job_damaged, tmp_path)


def job_options(rank, folder):
    result = train(folder, 2, gradient_accumulation_steps=2, max_grad_norm=0.01)
    assert torch.equal(result, plain(rank, 2, accumulate=2, clip=0.01))
    assert torch.equal(train(folder, 2, bf16=True), plain(rank, 2, dtype=torch.bfloat16))


def test_accumulation_clipping_and_bf16_are_those_of_the_plain_loop(two_ranks, tmp_path):
    two_ranks.run(job_options, tmp_path)


def job_scaler(rank, folder):
    trainer, wire = make_trainer(folder, 1)
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    trainer.train()
    other = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    assert torch.equal(flat(trainer.model), plain(rank, 1, scaler=other))
    assert scaler.get_scale() > 1024
    assert wire.state_dict()["loss_scale"] is not None, "residuals follow the scale"


def test_a_grad_scaler_is_followed(two_ranks, tmp_path):
    two_ranks.run(job_scaler, tmp_path)


def job_compiled(rank, folder):
    result = train(folder, 2, torch_compile=True, torch_compile_backend="eager")
    assert torch.equal(result, plain(rank, 2))


def test_compiled_models_train(two_ranks, tmp_path):
    two_ranks.run(job_compiled, tmp_path)


def job_logs(rank, folder):
    trainer, _ = make_trainer(folder, 2, logging_strategy="steps", logging_steps=NUM_STEPS)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 2
    last = lines[-1]
    assert last["gradwire/total_bytes_sent"] == 2 * NUM_STEPS * last["gradwire/bytes_sent"] > 0
    assert 0 <= last["gradwire/wait_share"] <= 1


def test_figures_go_where_the_trainer_logs(two_ranks, tmp_path):
    two_ranks.run(job_logs, tmp_path)


def job_evaluation(rank, folder):
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": False}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the loss falls: no better one
    trainer, _ = make_trainer(folder, 9, callbacks=[EarlyStoppingCallback(1)], **options)
    trainer.train()
    assert trainer.state.global_step == 2 * NUM_STEPS, "stopped early"
    assert torch.equal(flat(trainer.model), plain(rank, 2))


def test_evaluation_and_early_stopping_change_no_bits(two_ranks, tmp_path):
    two_ranks.run(job_evaluation, tmp_path)


class Failing(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyError("an odd batch")


def job_exception(rank, folder):
    trainer, wire = make_trainer(folder, 1, callbacks=[Failing()])
    with pytest.raises(KeyError, match="an odd batch"):
        trainer.train()
    trainer.pop_callback(Failing)
    trainer.train()
    assert wire.stats().num_steps == NUM_STEPS
    assert all_equal(flat(trainer.model))


def test_a_trainer_trains_again_after_an_exception_in_a_callback(two_ranks, tmp_path):
    two_ranks.run(job_exception, tmp_path)


def job_unused(rank, folder):
    trainer, wire = make_trainer(folder, 1, find_unused=None)
    with Heard() as heard:
        trainer.train()
    assert "pass ddp_find_unused_parameters=False" in heard.text
    assert wire.stats().num_steps == NUM_STEPS


def test_the_search_for_unused_parameters_is_explained(two_ranks, tmp_path):
    two_ranks.run(job_unused, tmp_path)


def job_local(rank, folder):
    trainer, wire = make_trainer(folder, 2, "local")
    trainer.train()
    assert all_equal(flat(trainer.model))
    assert wire.stats().num_steps == 3


def test_local_sgd_averages_by_period_and_at_the_end(two_ranks, tmp_path):
    two_ranks.run(job_local, tmp_path)


def test_wrong_recipes_are_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'int4'"):
        attach(None, "itn4")
