"""A run in progress: its model, data and steps, from the last checkpoint to the result."""

import json
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flatmin.lab.data.datasets import load_dataset
from flatmin.lab.data.images import Images
from flatmin.lab.data.pipeline import epoch_batches
from flatmin.lab.data.randomness import Purpose, torch_seed
from flatmin.lab.errors import CorruptFileError, DivergedError, InterruptedRun, RunError
from flatmin.lab.models.build import build_model, set_training_mode
from flatmin.lab.runs.checkpoint import latest_checkpoint, prepare_directory, save_checkpoint, save_epoch_weights
from flatmin.lab.runs.directory import Result, RunDirectory
from flatmin.lab.runs.environment import check_inputs, environment, read_sessions
from flatmin.lab.runs.history import Metrics, add_metrics, read_history, tensorboard, write_events, write_history
from flatmin.lab.runs.json_files import append, write_json
from flatmin.lab.spec.fields import finite
from flatmin.lab.training.auto_rho import suggestion
from flatmin.lab.training.distributed import Workers
from flatmin.lab.training.evaluation import evaluate, what_is_evaluated
from flatmin.lab.training.schedule import learning_rate, settles, settling_factor
from flatmin.lab.training.session import Callback, Clock, Interruption, RunProgress, fixes
from flatmin.lab.training.steps import StepMetrics, Stepper
from flatmin.lab.training.trained_model import (
    PREDICTED_LABELS,
    load_trained,
    model_pipeline,
    read_predicted_labels,
    relabeled,
    with_weights_file,
)

GPU_ATTENTION_STEPS = 20  # reading the loss, or asking the other workers, synchronizes with the device


class Run:
    """A run in progress. Building it reads data and initial weights; nothing is written before `resume`."""

    def __init__(self, directory: RunDirectory, workers: Workers, data_root: Path | None) -> None:
        self.directory, self.workers, self.data_root = directory, workers, data_root
        self.experiment = experiment = directory.experiment
        self.dataset = workers.on_each(lambda: load_dataset(experiment.data, data_root=data_root))
        seed = directory.seed
        if experiment.data.bootstrap:
            seed = torch_seed(seed, Purpose.SECOND_STAGE)  # from scratch: another start, another order
        self.seed = seed
        torch.manual_seed(torch_seed(seed, Purpose.NETWORK_INIT))
        info = self.dataset.info
        network = workers.on_each(self._build_network)
        self.inputs = workers.on_main(lambda: check_inputs(directory.path, self.dataset, self.weights_file))
        self.network: nn.Module = network.to(workers.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.stepper = Stepper(experiment, self.network, seed, workers)
        self.pipeline = model_pipeline(network, experiment, info, seed, workers)
        self.steps_per_epoch = len(epoch_batches(len(self.dataset.train.labels), experiment.data, seed, 0))
        self.num_steps = experiment.epochs * self.steps_per_epoch
        workers.on_main(self._check_batch_size)
        self.names = what_is_evaluated(info.num_classes)
        self.progress = RunProgress(sums=torch.zeros(5, dtype=torch.float64, device=workers.device))
        self.bad_step = torch.tensor(-1, device=workers.device)
        self.attention_steps = GPU_ATTENTION_STEPS if workers.device.type == "cuda" else 1

    def _build_network(self) -> nn.Module:
        """Build the model; only the main process needs a checkpoint's file, as DDP shares its weights."""
        model, info = self.experiment.model.without_checkpoint(), self.dataset.info
        if self.workers.is_main:
            model = with_weights_file(self.experiment.model, self.directory.path.parent)
        self.weights_file = model.checkpoint
        return build_model(model, num_classes=info.num_classes, in_channels=info.channels)

    def _check_batch_size(self) -> None:
        smallest = len(self.dataset.train.labels) // self.steps_per_epoch
        if smallest < self.workers.count:
            raise RunError(
                f"A batch of {smallest} examples cannot be divided among {self.workers.count} workers: each needs at "
                "least one. Use a larger data.batch_size (or more data), or fewer workers."
            )

    def resume(self) -> None:
        """Load the latest usable checkpoint, or save the start, which shows that checkpoints can be written."""
        if self.experiment.data.bootstrap:
            self.dataset = relabeled(self.dataset, self.workers.on_main(self._predicted_labels))
        state, history = self.workers.on_main(self._read_saved)
        if state is not None:
            self.network.load_state_dict(state["model"])
            self.stepper.optimizer.load_state_dict(state["optimizer"])
            self.progress = RunProgress.from_state(state, history, self.workers)
        if self.experiment.optim.rho_factor is not None and self.experiment.epochs:
            self.stepper.set_rho(self._suggested_rho() if state is None else self.progress.rho)
            self.progress.rho = self.stepper.rho
        self.workers.on_main(self._write_start)
        if state is None and self.experiment.epochs:  # without training, the evaluation saves the one checkpoint
            self._keep_weights()  # first: a run that has a checkpoint has its initial weights
            self.save()

    def _suggested_rho(self) -> float:
        """Measure the radius of a run whose `optim.rho` is auto or a factor; exactly once, before the first step."""
        set_training_mode(self.network, self.experiment.model)
        try:
            suggested = suggestion(self.stepper, self.pipeline.training(self.dataset.train, epoch=0))
        except ValueError as error:
            raise RunError(f"optim.rho is {self.experiment.optim.rho}: {error}") from error
        return suggested.rho * self.experiment.optim.rho_number

    def _predicted_labels(self) -> NDArray[np.int64]:
        """Return what the first model predicts (Section 3.3); it is saved: a resumed run sees the same labels."""
        path = self.directory.path
        if not (path / PREDICTED_LABELS).exists():
            first_stage = path.with_name(self.experiment.first_stage().run_name(self.directory.seed))
            labels = load_trained(first_stage, data_root=self.data_root).predicted_labels()
            num_changed = int((self.dataset.train.labels != labels).sum())
            write_json(path / PREDICTED_LABELS, {"num_changed": num_changed, "labels": labels.tolist()}, indent=None)
        return read_predicted_labels(path, self.dataset)

    def _read_saved(self) -> tuple[dict[str, Any] | None, list[Metrics]]:
        """Return the latest usable checkpoint and the metrics of its epochs."""
        copies = {"sgd": 2, "adamw": 3}[self.experiment.optim.name]  # the weights and the optimizer's averages
        num_bytes = copies * sum(int(t.nbytes) for t in self.network.state_dict().values())
        prepare_directory(self.directory.checkpoints, num_bytes)
        state = latest_checkpoint(self.directory.checkpoints, self._check_state)
        if state is None:
            return None, []
        history, num_epochs = read_history(self.directory.path), state["epoch"]
        if len(history) < num_epochs:
            why = f"it has {len(history)} of the {num_epochs} epochs of the latest checkpoint"
            raise CorruptFileError(self.directory.path / "metrics.jsonl", why)
        return state, history[:num_epochs]

    def _write_start(self) -> None:
        path, data = self.directory.path, self.experiment.data
        facts = {"num_workers": self.workers.count, "precision": self.stepper.precision, "inputs": self.inputs}
        write_json(path / "environment.json", {"sessions": [*read_sessions(path), environment() | facts]})
        write_history(path, self.progress.history)
        if data.label_noise:
            flipped = self.dataset.flipped.tolist()
            noise = {"rate": data.label_noise, "seed": data.seed, "num_flipped": len(flipped), "flipped": flipped}
            write_json(path / "label_noise.json", noise, indent=None)

    def run_epochs(self, callback: Callback | None, interruption: Interruption, checkpoint_seconds: float) -> Result:
        """Train the remaining epochs."""
        progress, clock = self.progress, Clock(checkpoint_seconds)
        if callback is not None:
            callback.on_start(self.directory.path, self.num_steps, progress.step)
        with tensorboard(self.directory.path, progress.epoch) if self.workers.is_main else nullcontext() as events:
            if self.experiment.epochs == 0:
                self._evaluate_checkpoint(events)
            while not self._finished():
                set_training_mode(self.network, self.experiment.model)
                settling = self._settling()
                clock.start()
                for batch in self.pipeline.training(self.dataset.train, progress.epoch, start=progress.batch):
                    lr = learning_rate(self.experiment.optim, progress.step, self.num_steps, self.steps_per_epoch)
                    lr *= settling
                    measured = self.stepper.step(batch, progress.step, lr)
                    self._count(measured, len(batch.examples))
                    progress.step, progress.batch = progress.step + 1, batch.number + 1
                    num_examples = round(len(batch.examples) * self.workers.count / batch.share)
                    clock.num_examples += num_examples
                    if callback is not None:
                        callback.on_step(progress.step, num_examples, measured)
                    if progress.batch < self.steps_per_epoch and progress.step % self.attention_steps == 0:
                        self._pause(clock, interruption)
                self._stop_if_diverged()
                progress.time_seconds += clock.stop()
                self._complete_epoch(events, callback, clock.num_examples / clock.epoch_seconds, lr)
                self._pause(clock, interruption)
        return self.workers.on_main(lambda: self.directory.finish(progress.time_seconds))

    def _count(self, measured: StepMetrics, num_examples: int) -> None:
        """Add a step to the epoch's sums and remember the first step whose loss is not finite, on the device."""
        at_w, perturbed = measured.at_w, measured.perturbed
        means = torch.stack([at_w.loss, at_w.error, perturbed.loss, perturbed.error]).double()
        self.progress.sums += num_examples * torch.cat([means.new_ones(1), means])
        diverges_now = ~means.isfinite().all() & (self.bad_step < 0)
        self.bad_step = torch.where(diverges_now, self.progress.step, self.bad_step)

    def _complete_epoch(self, events: Any, callback: Callback | None, examples_per_second: float, lr: float) -> None:
        """Evaluate, write the epoch's line, and start the next epoch."""
        progress, optim = self.progress, self.experiment.optim
        sam = optim.uses_sam
        num, loss, error, perturbed_loss, perturbed_error = self.workers.sum(progress.sums).tolist()
        metrics: Metrics = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "lr": lr,
            "train_loss": loss / num,
            "train_error": error / num,
            "perturbed_loss": perturbed_loss / num if sam else None,
            "perturbed_error": perturbed_error / num if sam else None,
            "sharpness": (perturbed_loss - loss) / num if sam else None,
        }
        metrics |= {} if optim.rho_factor is None else {"rho": progress.rho}
        if self.experiment.target_loss is not None:
            metrics |= self._evaluated("fit", self.dataset.train, ("loss", "error"))
        progress.history.append(metrics)
        progress.epoch, progress.batch, progress.sums = progress.epoch + 1, 0, torch.zeros_like(progress.sums)
        evaluates = self._finished() or progress.epoch % self.experiment.evaluate_every == 0
        metrics |= self._held_out(evaluates)
        self._keep_weights()
        speed: Metrics = {"epoch": progress.epoch, "images_per_second": examples_per_second}
        self.workers.on_main(lambda: self._write_epoch(metrics, speed, events))
        if callback is not None:
            callback.on_epoch(metrics, speed)

    def _evaluate_checkpoint(self, events: Any) -> None:
        """Write the one line of a run without training."""
        metrics: Metrics = {"epoch": 0, "step": 0, "train_loss": None, **self._held_out()}
        self.progress.history = [metrics]
        self.workers.on_main(lambda: self._write_epoch(metrics, {"epoch": 0, "images_per_second": None}, events))
        self.save()

    def _write_epoch(self, metrics: Metrics, speed: Metrics, events: Any) -> None:
        add_metrics(self.directory.path, metrics)
        append(self.directory.path / "speed.jsonl", json.dumps(speed) + "\n")
        write_events(events, metrics | speed)

    def _finished(self) -> bool:
        """Return whether all epochs are done, or the loss is as low as `stop_loss` or `target_loss` asks for."""
        progress, stop_loss, target = self.progress, self.experiment.stop_loss, self.experiment.target_loss
        last = progress.history[-1] if progress.history else {}
        loss, fit_loss = last.get("train_loss"), last.get("fit_loss")
        fitted = stop_loss is not None and loss is not None and loss <= stop_loss
        settled = target is not None and fit_loss is not None and settles(fit_loss, target)
        return fitted or settled or progress.epoch == self.experiment.epochs

    def _settling(self) -> float:
        """Return the factor of the learning rate in this epoch: a function of the metrics, which a resumed run has."""
        target, epochs = self.experiment.target_loss, self.experiment.epochs
        losses = [line.get("fit_loss") for line in self.progress.history]
        return 1.0 if target is None else settling_factor(losses, target, epochs)

    def _evaluated(self, part: str, images: Images, names: tuple[str, ...]) -> Metrics:
        batches = self.pipeline.evaluation(images)
        values = evaluate(self.network, batches, names, self.stepper.precision, self.workers)
        return {f"{part}_{name}": value for name, value in finite(values).items()}

    def _held_out(self, evaluates: bool = True) -> Metrics:
        """Return loss and errors on the validation and test sets; None for each if it does not evaluate now."""
        metrics: Metrics = {}
        for part, images in (("valid", self.dataset.valid), ("test", self.dataset.test)):
            if images is not None:
                unknown = dict.fromkeys(f"{part}_{name}" for name in self.names)
                metrics |= self._evaluated(part, images, self.names) if evaluates else unknown
        return metrics

    def _keep_weights(self) -> None:
        """Save the weights after an epoch if `keep_every` asks for them."""
        every, epoch = self.experiment.keep_every, self.progress.epoch
        if every is not None and epoch % every == 0:
            weights = self.network.state_dict()
            self.workers.on_main(lambda: save_epoch_weights(self.directory.weights, epoch, weights))

    def stop_if_interrupted(self, interruption: Interruption) -> None:
        """Stop if a signal arrived before training started."""
        (stop,) = self._largest(interruption.signal_number)
        if stop:
            name = signal.Signals(stop).name
            raise InterruptedRun(stop, f"Stopped by {name} before training started: rerun the command to start.")

    def _pause(self, clock: Clock, interruption: Interruption) -> None:
        """Between two steps: stop if the loss diverged, save if it is time to, stop if a signal arrived."""
        self._stop_if_diverged()
        finished = self._finished()
        due = finished or (self.workers.is_main and clock.checkpoint_is_due())
        stop, save = self._largest(0 if finished else interruption.signal_number, int(due))
        if stop or save:
            self.progress.time_seconds += clock.stop()
            self.save()
            clock.saved()
        if stop:
            raise InterruptedRun(
                stop,
                f"Stopped by {signal.Signals(stop).name} after step {self.progress.step} of {self.num_steps}. "
                f"Everything is saved in {self.directory.path}: rerun the command to resume.",
            )

    def _stop_if_diverged(self) -> None:
        (bad_step,) = self._largest(int(self.bad_step))
        if bad_step < 0:
            return
        epoch, number = divmod(bad_step, self.steps_per_epoch)
        examples = epoch_batches(len(self.dataset.train.labels), self.experiment.data, self.seed, epoch)[number]
        raise DivergedError(
            f"The loss diverged (NaN or inf) at step {bad_step} (epoch {epoch + 1}, batch {number}, examples "
            f"{', '.join(map(str, examples[:8]))}, ...). The last good checkpoint is kept in "
            f"{self.directory.checkpoints}. Try {', '.join(fixes(self.experiment.optim, self.stepper.precision))}."
        )

    def _largest(self, *numbers: int) -> list[int]:
        """Return the largest of each number over all workers."""
        gathered = self.workers.gather(torch.tensor(numbers, device=self.workers.device))
        return [int(n) for n in torch.stack(gathered).amax(0)]

    def save(self) -> None:
        """Write a checkpoint; every worker takes part."""
        sums = torch.stack(self.workers.gather(self.progress.sums)).cpu()
        state = {
            "model": self.network.state_dict(),
            "optimizer": self.stepper.optimizer.state_dict(),
            **self.progress.to_state(sums),
        }
        self.workers.on_main(lambda: save_checkpoint(self.directory.checkpoints, self.progress.step, state))

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError if a state is not one that this run can resume from."""
        try:
            progress = RunProgress.from_state(state, [], self.workers)
            shapes = {name: tensor.shape for name, tensor in state["model"].items()}
            sizes = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
            expected = divmod(progress.step, self.steps_per_epoch)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise ValueError(f"it does not hold the state of a run: {type(error).__name__} {error}") from error
        if (progress.epoch, progress.batch) != expected:
            raise ValueError("its step and epoch do not fit together")
        if self.experiment.optim.rho_factor is not None and not progress.rho > 0:
            raise ValueError("it has no radius, which is measured before the first step")
        if progress.step > self.num_steps:
            raise ValueError(f"it is of step {progress.step}, and the run has only {self.num_steps} steps")
        if shapes != {name: tensor.shape for name, tensor in self.network.state_dict().items()}:
            raise ValueError("its weights belong to another model")
        if sizes != [len(group["params"]) for group in self.stepper.optimizer.param_groups]:
            raise ValueError("its optimizer belongs to another model")
