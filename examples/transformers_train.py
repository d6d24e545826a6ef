"""Train a tiny language model with the Trainer of Transformers; with --recipe, by gradwire.

torchrun --nproc-per-node 2 examples/transformers_train.py --recipe int4
gradwire run --ranks 2 --recipe int4 -- examples/transformers_train.py
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class ShowSteps(TrainerCallback):
    """Prints each step, on rank 0."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print the number of the step."""
        if state.is_world_process_zero:
            print("step", state.global_step, flush=True)


def main() -> None:
    """Train, and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", help="average gradients by this recipe of gradwire")
    parser.add_argument("--shard", action="store_true", help="shard the model by FSDP2, on GPUs")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/transformers"))
    parser.add_argument("--resume", help="a checkpoint to resume from")
    options = parser.parse_args()

    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    rows = torch.randint(64, (128, 16))
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir=str(options.folder),
            use_cpu=not torch.cuda.is_available(),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=8,
            save_strategy="epoch",
            ddp_find_unused_parameters=False,
            fsdp=True if options.shard else None,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[ShowSteps()],
    )
    if options.recipe:
        from gradwire.adapters.transformers import attach

        attach(trainer, options.recipe)
    trainer.train(resume_from_checkpoint=options.resume)
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        torch.save(weights, options.folder / "weights.pt")
        print("trained", trainer.state.global_step, "steps in all")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
