"""A small GPT on the characters of a few docstrings, trained with AdamW, SAM, and SAM on 1/8 of each batch.

The text is small, so the model sees it many times and overfits: the case in which SAM helps.
``python examples/char_transformer.py`` takes minutes on a CPU, and ``--steps 20`` seconds.
"""

import argparse
import inspect
import time

import torch
from torch import nn

from flatmin import SAM, suggest_rho

MODULES = ("difflib", "random")
BATCH, CONTEXT, WIDTH, HEADS, DEPTH = 32, 64, 64, 4, 2
METHODS = {"AdamW": None, "SAM": 1.0, "SAM on 1/8": 1 / 8}  # the part that carries the correction


def make_text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the characters to train on and to validate on, as numbers, and how many there are."""
    docstrings: dict[str, None] = {}  # an ordered set
    for name in MODULES:
        module = __import__(name)
        members = [member for _, member in inspect.getmembers(module, inspect.isclass)]
        members += [method for member in members for _, method in inspect.getmembers(member, inspect.isfunction)]
        docstrings |= dict.fromkeys(inspect.getdoc(member) or "" for member in [module, *members])
    # Every tenth docstring is held out.
    parts = ["\n\n".join(list(docstrings)[i::10]) for i in range(10)]
    train, valid = "\n\n".join(parts[:9]), parts[9]
    codes = {character: code for code, character in enumerate(sorted(set(train + valid)))}
    return *(torch.tensor([codes[character] for character in part]) for part in (train, valid)), len(codes)


class Block(nn.Module):
    """Causal self-attention and a perceptron, each added to its normalized input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.attend(self.norm_1(x)).split(WIDTH, dim=-1)
        )
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attention.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class CharTransformer(nn.Module):
    """A GPT whose output layer shares the weights of its embedding."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(num_characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_characters, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.embed.weight  # tied: one parameter, perturbed once

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def batch_of(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


def train(part: float | None, num_steps: int) -> tuple[CharTransformer, list[float]]:
    """Train with SAM on a part of each batch (or with plain AdamW), and return the model and its validation losses."""
    train_text, valid_text, num_characters = make_text()
    torch.manual_seed(0)
    model = CharTransformer(num_characters)
    opt = SAM(torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1), rho=0.0, model=model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=5e-3, total_steps=num_steps, pct_start=0.1)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    @torch.no_grad()
    def validation_loss() -> float:
        windows = valid_text[: len(valid_text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        return float(loss_fn(windows[:, :-1], windows[:, 1:]))

    generator = torch.Generator().manual_seed(1)
    if part is not None:
        batches = [batch_of(train_text, torch.Generator().manual_seed(i)) for i in range(8)]
        # A rise by 1 %, not 10 %: transformers need radii ten times smaller.
        opt.rho = suggest_rho(opt, loss_fn, batches, m=int(BATCH * part), rise=0.01).rho
        print(f"  rho {opt.rho:.3g}")
    losses, start = [], time.perf_counter()
    for step in range(1, num_steps + 1):
        loss = opt.step_batch(loss_fn, batch_of(train_text, generator), part=part or 1.0)
        schedule.step()
        if step % max(num_steps // 5, 1) == 0:
            losses.append(validation_loss())
            seconds = time.perf_counter() - start
            print(f"  step {step}: training loss {loss:.3f}, validation loss {losses[-1]:.3f}, {seconds:.0f} s")
    return model, losses


def main(num_steps: int = 1000) -> dict[str, float]:
    """Train with each method, and return the lowest validation losses."""
    lowest = {}
    for name, part in METHODS.items():
        print(name)
        lowest[name] = min(train(part, num_steps)[1])
    for name, loss in lowest.items():
        print(f"{name}: lowest validation loss {loss:.3f}")
    return lowest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    main(parser.parse_args().steps)
