"""Accelerate: a loop with `attach` trains as the plain loop does, and resumes exactly."""

import shutil

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, TorchDynamoPlugin
from torch.utils.data import DataLoader

import gradwire
from gradwire.adapters.accelerate import attach, attach_local_sgd
from gradwire.testing import run_ranks
from tests.frameworks.problem import (
    BATCH,
    BUCKET_MB,
    NUM_STEPS,
    RECIPE,
    Heard,
    all_equal,
    assert_taken_over,
    damages,
    flat,
    loss_of,
    make_net,
    make_optimizer,
    make_rows,
    set_torchrun_variables,
    train_plainly,
)


class Run:
    """A loop as users write it."""

    def __init__(self, way="after", scaler=None, **options):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        handlers = [DistributedDataParallelKwargs(bucket_cap_mb=options.pop("bucket_mb", BUCKET_MB))]
        self.accelerator = accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **options)
        if scaler is not None:  # Accelerate has fp16 on accelerators only
            accelerator.scaler = scaler
        net = make_net()
        optimizer = make_optimizer(net)
        if way == "before":
            self.wire = attach(accelerator, net, RECIPE)
        if way == "local before":
            self.wire = attach_local_sgd(accelerator, net, optimizer, period=3, recipe=RECIPE)
        self.model, self.optimizer, self.loader = accelerator.prepare(
            net, optimizer, DataLoader(make_rows(), batch_size=BATCH)
        )
        if way == "after":
            self.wire = attach(accelerator, self.model, RECIPE)
        if way == "local":
            outer = gradwire.DiLoCo()
            self.wire = attach_local_sgd(
                accelerator, self.model, self.optimizer, period=3, recipe=RECIPE, outer=outer
            )
        self.way = way

    def train(self, epochs, clip=None):
        accelerator = self.accelerator
        for _ in range(epochs):
            for batch in self.loader:
                with accelerator.accumulate(self.model):
                    accelerator.backward(loss_of(self.model(batch)))
                    if clip is not None and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.optimizer.step()
                    if self.way.startswith("local") and accelerator.sync_gradients:
                        self.wire.step()
                    self.optimizer.zero_grad()
        return flat(self.model)


def job_bits(rank, way):
    assert torch.equal(Run(way).train(3), train_plainly(rank, 3))


@pytest.mark.parametrize("way", ["before", "after"])
def test_training_ends_with_the_bits_of_the_plain_loop(two_ranks, way):
    two_ranks.run(job_bits, way)


def job_resume(rank, folder, way):
    whole = Run(way).train(4)
    first = Run(way)
    first.train(2)
    first.accelerator.save_state(folder / "state")
    first.accelerator.wait_for_everyone()
    resumed = Run(way)
    resumed.accelerator.load_state(folder / "state")
    assert torch.equal(resumed.train(2), whole)
    first.accelerator.wait_for_everyone()
    if rank == 0:
        shutil.rmtree(folder / "state" / "gradwire")
    first.accelerator.wait_for_everyone()
    other = Run(way)
    with Heard() as heard:
        other.accelerator.load_state(folder / "state")
    assert ("it was made without gradwire" in heard.text) == (rank == 0)
    assert not torch.equal(other.train(2), whole)


@pytest.mark.parametrize("way", ["before", "after", "local", "local before"])
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_stopped(two_ranks, tmp_path, way):
    two_ranks.run(job_resume, tmp_path, way)


def job_save(rank, folder):
    set_torchrun_variables()
    run = Run()
    run.train(1)
    run.accelerator.save_state(folder)


def job_take_over(rank, folder):
    run = Run()
    run.accelerator.load_state(folder)
    assert_taken_over(run.wire.state_dict()["memory"], folder / "gradwire", rank, num_saved=3)
    assert all_equal(run.train(1))


def test_another_number_of_ranks_takes_over_what_was_held_back(two_ranks, tmp_path):
    run_ranks(job_save, 3, 240, args=(tmp_path,))
    two_ranks.run(job_take_over, tmp_path)


def job_rotation(rank, folder):
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    run = Run(project_config=project)
    for _ in range(3):
        run.train(1)
        run.accelerator.save_state()
        run.accelerator.wait_for_everyone()
    files = sorted(str(p.relative_to(folder / "checkpoints")) for p in folder.rglob("rank*.pt"))
    assert files == [f"checkpoint_{n}/gradwire/rank{r}.pt" for n in (1, 2) for r in (0, 1)]
    resumed = Run(project_config=project)
    resumed.accelerator.load_state()  # the newest
    assert torch.equal(resumed.train(1), run.train(1))


def test_states_are_rotated_with_their_checkpoints(two_ranks, tmp_path):
    two_ranks.run(job_rotation, tmp_path)


def job_damaged(rank, folder):
    run = Run()
    run.train(1)
    run.accelerator.save_state(folder)
    for message in damages(rank, folder / "gradwire"):
        with pytest.raises(ValueError, match=message):
            run.accelerator.load_state(folder)


def test_a_missing_or_foreign_file_is_an_error_on_every_rank(two_ranks, tmp_path):
    two_ranks.run(job_damaged, tmp_path)


def job_options(rank):
    run = Run(gradient_accumulation_steps=2)
    expected = train_plainly(rank, 2, accumulate=2, clip=0.01)
    assert torch.equal(run.train(2, clip=0.01), expected)
    assert run.wire.stats().num_steps == NUM_STEPS
    assert torch.equal(Run(mixed_precision="bf16").train(2), train_plainly(rank, 2, dtype=torch.bfloat16))
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))
    assert torch.equal(Run(scaler=scaler).train(2), train_plainly(rank, 2, scaler=other))
    assert scaler.get_scale() > 1024


def test_accumulation_clipping_and_mixed_precision_are_those_of_the_plain_loop(two_ranks):
    two_ranks.run(job_options)


def job_compiled(rank):
    run = Run(dynamo_plugin=TorchDynamoPlugin(backend="eager"), bucket_mb=25)
    assert torch.equal(run.train(2), train_plainly(rank, 2, bucket_mb=25))


def test_compiled_models_train(two_ranks):
    two_ranks.run(job_compiled)


class Notes(GeneralTracker):
    name, requires_logging_directory = "notes", False

    def __init__(self):
        super().__init__()
        self.values = []

    @property
    def tracker(self):
        return self

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.values.append((step, values))

    def store_init_configuration(self, values):
        pass


def job_trackers(rank):
    notes = Notes()
    run = Run(log_with=notes)
    run.accelerator.init_trackers("project")
    assert run.wire.metrics() == {}
    run.train(1)
    run.accelerator.log({"loss": 1.0, **run.wire.metrics()}, step=NUM_STEPS)
    if rank == 0:
        ((step, values),) = notes.values
        assert step == NUM_STEPS
        assert values["gradwire/total_bytes_sent"] == NUM_STEPS * values["gradwire/bytes_sent"] > 0
        assert 0 <= values["gradwire/wait_share"] <= 1


def test_figures_go_to_the_accelerators_trackers(two_ranks):
    two_ranks.run(job_trackers)


def job_evaluation(rank):
    run = Run()
    run.train(1)
    run.model.eval()
    with torch.no_grad():
        outputs = [run.accelerator.gather_for_metrics(run.model(batch)) for batch in run.loader]
    assert len(torch.cat(outputs)) == len(make_rows())
    run.model.train()
    assert torch.equal(run.train(2), train_plainly(rank, 3))


def test_evaluation_changes_no_bits(two_ranks):
    two_ranks.run(job_evaluation)


def job_two_models(rank, folder):
    run = Run()
    second = run.accelerator.prepare(make_net())
    attach(run.accelerator, second, "int8")
    run.train(1)
    second(torch.ones(1, 8)).sum().backward()
    run.accelerator.save_state(folder)
    run.accelerator.wait_for_everyone()
    assert {path.name for path in folder.glob("gradwire*")} == {"gradwire", "gradwire_1"}
    run.accelerator.load_state(folder)


def test_two_models_keep_their_states_apart(two_ranks, tmp_path):
    two_ranks.run(job_two_models, tmp_path)


def job_exception(rank):
    run = Run()
    with pytest.raises(KeyError, match="an odd batch"):
        for index, batch in enumerate(run.loader):
            run.accelerator.backward(loss_of(run.model(batch)))
            if index == 2:
                raise KeyError("an odd batch")
    run.wire.detach()
    run.wire = attach(run.accelerator, run.model, RECIPE)
    run.optimizer.zero_grad()
    assert all_equal(run.train(2))
    assert run.wire.stats().num_steps == 2 * NUM_STEPS


def test_a_loop_goes_on_after_an_exception(two_ranks):
    two_ranks.run(job_exception)


def job_local(rank):
    run = Run("local")
    run.train(2)
    run.wire.average()
    assert all_equal(flat(run.model))
    assert run.wire.stats().num_steps == 3


def test_local_sgd_averages_by_period(two_ranks):
    two_ranks.run(job_local)


def test_with_one_process_nothing_is_attached(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    accelerator, net = Accelerator(cpu=True), make_net()
    with Heard() as heard:
        wire = attach(accelerator, net, "int4")
    assert "this is the only process" in heard.text
    assert wire.metrics() == {}
    with pytest.raises(RuntimeError, match="made no distributed model in this process so far"):
        wire.stats()
    with pytest.raises(ValueError, match="did you mean 'int4'"):
        attach(accelerator, net, "itn4")
