"""The Hugging Face Trainer: SAMTrainer in place of Trainer, and SAM's settings."""

import tempfile

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from flatmin.integrations.transformers import SAMTrainer


def make_model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **size, **dropouts))


def make_data() -> list[dict]:
    tokens = torch.randint(0, 50, (64, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": (row[0] > 25).long()} for row in tokens]


def main(trainer_class: type[Trainer] = SAMTrainer, dropout: float = 0.1, **settings) -> Trainer:
    with tempfile.TemporaryDirectory() as directory:
        quiet = {
            "output_dir": directory,
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
            sam={"rho": 0.01},
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
