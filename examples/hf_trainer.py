"""The Hugging Face Trainer: a subclass whose training step runs both passes, also with gradient accumulation."""

import contextlib
import tempfile

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from flatmin import SAM


class SAMTrainer(Trainer):
    """One SAM step per optimizer step, with one perturbation for all the micro-batches of a worker."""

    def __init__(self, *args, rho: float = 0.05, **kwargs):
        super().__init__(*args, **kwargs)
        self.rho, self.micro_batches = rho, []

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.sam = SAM(super().create_optimizer(model), rho=self.rho, model=self.model)
        self.optimizer = self.sam
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch=None) -> torch.Tensor:
        self.micro_batches.append(inputs)
        if not self.accelerator.sync_gradients:  # wait for the last micro-batch of the step
            return torch.zeros((), device=self.args.device)
        (*others, last), self.micro_batches = self.micro_batches, []
        no_sync = getattr(model, "no_sync", contextlib.nullcontext)  # of DistributedDataParallel

        def run(inputs: dict) -> torch.Tensor:
            return super(SAMTrainer, self).training_step(model, inputs, num_items_in_batch)

        with torch.random.fork_rng(), no_sync():  # fork_rng: dropout draws the same noise in both passes
            loss = sum(run(inputs) for inputs in [*others, last])
        with self.sam.perturbed():
            with no_sync():
                for inputs in others:
                    run(inputs)
            run(last)
        return loss


def make_model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **size, **dropouts))


def make_data() -> list[dict]:
    tokens = torch.randint(0, 50, (64, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": (row[0] > 25).long()} for row in tokens]


def main(trainer_class: type[Trainer] = SAMTrainer, dropout: float = 0.1, **settings) -> Trainer:
    with tempfile.TemporaryDirectory() as folder:
        quiet = {
            "output_dir": folder,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
        }
        rates = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
        trainer = trainer_class(
            model=make_model(dropout),
            args=TrainingArguments(**quiet | rates | {"num_train_epochs": 4, "logging_steps": 4} | settings),
            train_dataset=make_data(),
            rho=0.01,
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
