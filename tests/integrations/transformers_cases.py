"""The model and data of tests/integrations/test_transformers.py, also for its two processes."""

import tempfile

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, TrainingArguments

from flatmin.integrations.transformers import SAMTrainer

transformers.utils.logging.set_verbosity_error()


def make_model(language_model=False, dropout=0.0):
    torch.manual_seed(0)
    if language_model:
        size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
        return GPT2LMHeadModel(GPT2Config(vocab_size=20, **size, resid_pdrop=dropout, attn_pdrop=0.0, embd_pdrop=0.0))
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=2, **size, **dropouts))


def make_data(language_model=False):
    tokens = torch.randint(0, 20, (32, 6), generator=torch.Generator().manual_seed(1))
    if not language_model:
        return [{"input_ids": row, "labels": (row[0] > 10).long()} for row in tokens]
    rows = []
    for i, row in enumerate(tokens):
        labels = row.clone()
        labels[: i % 4] = -100  # another number of targets in each example
        rows.append({"input_ids": row, "labels": labels})
    return rows


def make_trainer(
    sam, trainer_class=SAMTrainer, language_model=False, dropout=0.0, output_dir=None, bases=None, **settings
):
    defaults = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "optim": "sgd"}
    defaults |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.1}
    defaults |= {"num_train_epochs": 1, "max_grad_norm": 0.0, "logging_steps": 1}
    defaults |= {"average_tokens_across_devices": False}  # which would double the loss of BERT with two workers
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(output_dir=output_dir or folder, **defaults | settings)
        model = make_model(language_model, dropout)
        given = {} if bases is None else {"optimizers": (bases(model), None)}
        return trainer_class(model=model, args=args, train_dataset=make_data(language_model), sam=sam, **given)


def train_with_ddp(rank, folder):
    """What each of two workers does."""
    for name, sam in {"whole": {}, "part": {"part": 0.5}}.items():
        trainer = make_trainer({"rho": 0.1, **sam}, data_seed=3)
        steps = []
        trainer_step = trainer.training_step

        def recording(model, inputs, num_items_in_batch=None, _step=trainer_step, _steps=steps):
            _steps.append({k: v.clone() for k, v in inputs.items()})
            return _step(model, inputs, num_items_in_batch)

        trainer.training_step = recording
        trainer.train()
        state = {k: v.clone() for k, v in trainer.accelerator.unwrap_model(trainer.model).state_dict().items()}
        torch.save((steps, state), f"{folder}/{name}-{rank}.pt")
