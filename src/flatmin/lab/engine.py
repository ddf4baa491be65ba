"""Trains one network: `train(experiment, seed)` from top to bottom.

The same spec and seed give the same weights and metrics, bit for bit, on the same machine with the same number of
workers, however often the run was killed in between. For that, everything random is a function of (seed, step,
example, worker), and a checkpoint between any two steps holds all the rest.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatmin.lab.checkpoint import StorageError, latest_checkpoint, prepare_folder, read_state, save_checkpoint
from flatmin.lab.data.datasets import Dataset, load_dataset
from flatmin.lab.data.images import Images
from flatmin.lab.data.pipeline import Pipeline, epoch_batches
from flatmin.lab.data.randomness import Purpose, torch_seed
from flatmin.lab.models.build import build_model, freeze_batch_norm, input_statistics
from flatmin.lab.precision import autocast
from flatmin.lab.run_directory import Metrics, Result, RunDirectory, RunError
from flatmin.lab.schedule import learning_rate
from flatmin.lab.session import Clock, Interruption, noted_signals
from flatmin.lab.spec import Experiment
from flatmin.lab.steps import StepMeasured, Stepper, loss_and_error
from flatmin.lab.workers import Workers, join_workers

CHECKPOINT_SECONDS = 60.0
GPU_ATTENTION_STEPS = 20  # looking at the loss, or asking the other workers, waits for the device


class DivergedError(RuntimeError):
    """The loss is not a number any more; the message names step, batch and remedies."""


class InterruptedRun(RuntimeError):  # noqa: N818  (nothing went wrong)
    """A signal came; the run was saved and will go on when started again."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class Listener(Protocol):
    """Is told how a run goes; called in the leading worker only."""

    def on_start(self, directory: Path, num_steps: int, step: int) -> None:
        """The run begins, or goes on, at a step."""

    def on_step(self, step: int, num_examples: int, measured: StepMeasured) -> None:
        """A step was taken, on so many examples over all workers."""

    def on_epoch(self, metrics: Metrics, speed: Metrics) -> None:
        """An epoch was completed and evaluated."""


@dataclass
class Progress:
    """Where a run stands: with weights and optimizer, all that a checkpoint has to hold."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    time_seconds: float = 0.0
    history: list[Metrics] = field(default_factory=list)
    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    """Of this worker in this epoch: examples, and over them loss, error, loss at w + eps, error at w + eps."""


def train(
    experiment: Experiment,
    *,
    seed: int = 0,
    runs: Path = Path("runs"),
    data_root: Path | None = None,
    listener: Listener | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Result:
    """Train, evaluate after every epoch, and return the result; go on where an earlier session stopped.

    Args:
        experiment: what to train.
        seed: initial weights, order, augmentation and random layers.
        runs: the folder of all runs; this one's directory is in it, named by ``experiment.run_name(seed)``.
        data_root: the first folder in which datasets are looked for.
        listener: is told how it goes.
        checkpoint_seconds: how long to train, at most, before saving; 0 saves after every step.

    Returns:
        The result; at once, if the run was finished before.

    Raises:
        DataError: the dataset is missing or damaged.
        ModelError: the network or its checkpoint cannot be had.
        StorageError: nothing can be written.
        BusyError: another process works on this run.
        RunError: another experiment is in its directory, or there are more workers than examples in a batch.
        DivergedError: the loss became NaN or infinite.
        InterruptedRun: SIGTERM or Ctrl-C came; everything is saved.
    """
    with join_workers() as workers, ExitStack() as stack:
        directory = RunDirectory(experiment, seed, runs)
        if workers.leads:
            directory.open()
            stack.callback(directory.close)
        workers.wait()
        finished = directory.result()
        if finished is not None:
            return finished
        stack.enter_context(torch.random.fork_rng([workers.device] if workers.device.type == "cuda" else []))
        interruption = stack.enter_context(noted_signals())
        run = _Run(experiment, seed, directory, workers, data_root)
        run.resume()
        return run.to_the_end(listener if workers.leads else None, interruption, checkpoint_seconds)


class _Run:
    """A run in progress."""

    def __init__(
        self, experiment: Experiment, seed: int, directory: RunDirectory, workers: Workers, data_root: Path | None
    ) -> None:
        self.experiment, self.seed, self.directory, self.workers = experiment, seed, directory, workers
        self.dataset = _load_once(experiment, workers, data_root)
        torch.manual_seed(torch_seed(seed, Purpose.NETWORK_INIT))
        info = self.dataset.info
        network = build_model(experiment.model, num_classes=info.num_classes, in_channels=info.channels)
        mean, std = input_statistics(network) or (info.mean, info.std)
        self.network: nn.Module = network.to(workers.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.stepper = Stepper(experiment, self.network, seed, workers)
        self.pipeline = Pipeline(
            data=experiment.data,
            info=info,
            mean=mean[: info.channels],
            std=std[: info.channels],
            seed=seed,
            device=workers.device,
            worker=workers.rank,
            num_workers=workers.count,
        )
        self.steps_per_epoch = len(epoch_batches(len(self.dataset.train.labels), experiment.data, seed, 0))
        self.num_steps = experiment.epochs * self.steps_per_epoch
        smallest = len(self.dataset.train.labels) // self.steps_per_epoch
        if smallest < workers.count:
            raise RunError(
                f"A batch of {smallest} examples cannot be divided among {workers.count} workers: each needs one at "
                "least. Use a larger data.batch_size (or more data), or fewer workers."
            )
        self.progress = Progress(sums=torch.zeros(5, dtype=torch.float64, device=workers.device))
        self.bad_step = torch.tensor(-1, device=workers.device)
        self.attention_steps = GPU_ATTENTION_STEPS if workers.device.type == "cuda" else 1

    def resume(self) -> None:
        """Load the latest whole checkpoint, or save the start, so that it is known that checkpoints can be written."""
        if self.workers.leads:
            prepare_folder(self.directory.checkpoints, self._checkpoint_bytes())
        found = latest_checkpoint(self.directory.checkpoints) if self.workers.leads else None
        content = self.workers.from_leader(found)
        if content is not None:
            self._load(read_state(content, self.workers.device))
        if self.workers.leads:
            precision = self.stepper.precision
            self.directory.add_environment({"num_workers": self.workers.count, "precision": precision})
            self.directory.write_history(self.progress.history)
            noise = self.experiment.data.label_noise
            if noise:
                self.directory.write_noise(noise, self.experiment.data.seed, self.dataset.flipped.tolist())
        if content is None:
            self.save()

    def to_the_end(self, listener: Listener | None, interruption: Interruption, checkpoint_seconds: float) -> Result:
        """Train the remaining epochs."""
        progress, clock = self.progress, Clock(checkpoint_seconds)
        if listener is not None:
            listener.on_start(self.directory.path, self.num_steps, progress.step)
        with self._tensorboard() as events:
            while progress.epoch < self.experiment.epochs:
                self._training_mode()
                clock.start()
                for batch in self.pipeline.training(self.dataset.train, progress.epoch, start=progress.batch):
                    lr = learning_rate(self.experiment.optim, progress.step, self.num_steps, self.steps_per_epoch)
                    measured = self.stepper.step(batch, progress.step, lr)
                    self._count(measured, len(batch.examples))
                    progress.step, progress.batch = progress.step + 1, batch.number + 1
                    num_examples = round(len(batch.examples) * self.workers.count / batch.share)
                    clock.num_examples += num_examples
                    if listener is not None:
                        listener.on_step(progress.step, num_examples, measured)
                    if progress.batch < self.steps_per_epoch and progress.step % self.attention_steps == 0:
                        self._pause(clock, interruption)
                self._stop_if_diverged()
                progress.time_seconds += clock.stop()
                self._complete_epoch(events, listener, clock.examples_per_second, lr)
                self._pause(clock, interruption)
        if self.workers.leads:
            self.directory.finish(progress.history, progress.time_seconds)
        self.workers.wait()
        result = self.directory.result()
        assert result is not None
        return result

    def _training_mode(self) -> None:
        self.network.train()
        if self.experiment.model.freeze_batch_norm:
            freeze_batch_norm(self.network)

    def _count(self, measured: StepMeasured, num_examples: int) -> None:
        """Add a step to the epoch's sums and remember the first step with a loss that is no number, on the device."""
        at_w, perturbed = measured.at_w, measured.perturbed
        means = torch.stack([at_w.loss, at_w.error, perturbed.loss, perturbed.error]).double()
        self.progress.sums += num_examples * torch.cat([means.new_ones(1), means])
        diverges_now = ~means.isfinite().all() & (self.bad_step < 0)
        self.bad_step = torch.where(diverges_now, self.progress.step, self.bad_step)

    def _complete_epoch(self, events: Any, listener: Listener | None, examples_per_second: float, lr: float) -> None:
        """Evaluate, write the epoch's line, and begin the next epoch."""
        progress, sam = self.progress, self.experiment.optim.rho > 0
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
        evaluates = (
            progress.epoch + 1
        ) % self.experiment.evaluate_every == 0 or progress.epoch + 1 == self.experiment.epochs
        for name, images in (("valid", self.dataset.valid), ("test", self.dataset.test)):
            if images is not None:
                found = self.evaluate(images) if evaluates else (None, None)
                metrics[f"{name}_loss"], metrics[f"{name}_error"] = found
        progress.history.append(metrics)
        progress.epoch, progress.batch, progress.sums = progress.epoch + 1, 0, torch.zeros_like(progress.sums)
        if self.workers.leads:
            speed: Metrics = {"epoch": progress.epoch, "images_per_second": examples_per_second}
            self.directory.add_metrics(metrics)
            self.directory.add_speed(speed)
            self._write_events(events, metrics | speed)
            if listener is not None:
                listener.on_epoch(metrics, speed)

    def _write_events(self, events: Any, line: Metrics) -> None:
        try:
            for name, value in line.items():
                if name not in ("epoch", "step") and value is not None:
                    events.add_scalar(name, value, line["epoch"])
            events.flush()
        except OSError as error:
            raise StorageError(f"{events.log_dir} cannot be written to: {error}. Checkpoints are untouched.") from error

    @torch.no_grad()
    def evaluate(self, images: Images) -> tuple[float, float]:
        """Return loss and error rate on a whole set of images, as at test time."""
        self.network.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.workers.device)
        for batch in self.pipeline.evaluation(images):
            with autocast(self.stepper.precision, self.workers.device):
                logits = self.network(batch.inputs)
            loss, error = loss_and_error(logits, batch)
            sums += len(batch.examples) * torch.stack([torch.ones_like(loss), loss, error]).double()
        num, loss_sum, error_sum = self.workers.sum(sums).tolist()
        return loss_sum / num, error_sum / num

    def _pause(self, clock: Clock, interruption: Interruption) -> None:
        """Between two steps: stop if the loss is no number, save if it is time to, stop if a signal came."""
        self._stop_if_diverged()
        finished = self.progress.epoch == self.experiment.epochs
        due = finished or (self.workers.leads and clock.checkpoint_is_due())
        stop, save = self._largest(0 if finished else interruption.signal_number, int(due))
        if stop or save:
            self.progress.time_seconds += clock.stop()
            self.save()
            clock.saved()
        if stop:
            raise InterruptedRun(
                stop,
                f"Stopped by {signal.Signals(stop).name} after step {self.progress.step} of {self.num_steps}. "
                f"Everything is saved in {self.directory.path}: run the same command again to go on.",
            )

    def _stop_if_diverged(self) -> None:
        (bad_step,) = self._largest(int(self.bad_step))
        if bad_step < 0:
            return
        epoch, number = divmod(bad_step, self.steps_per_epoch)
        examples = epoch_batches(len(self.dataset.train.labels), self.experiment.data, self.seed, epoch)[number]
        optim = self.experiment.optim
        advice = [f"a smaller optim.lr than {optim.lr:g}", "optim.warmup_epochs"]
        advice += [f"a smaller optim.rho than {optim.rho:g}"] if optim.rho > 0 else []
        advice += ["optim.clip_norm (the reference code has 5.0)"] if optim.clip_norm is None else []
        advice += ["precision float32"] if self.stepper.precision == "bfloat16" else []
        raise DivergedError(
            f"The loss is no number any more at step {bad_step} (epoch {epoch + 1}, batch {number}, examples "
            f"{', '.join(map(str, examples[:8]))}, ...). The last good checkpoint is kept in "
            f"{self.directory.checkpoints}. Try {', '.join(advice)}."
        )

    def _largest(self, *numbers: int) -> list[int]:
        """Return the largest of each number over all workers."""
        gathered = self.workers.gather(torch.tensor(numbers, device=self.workers.device))
        return [int(n) for n in torch.stack(gathered).amax(0)]

    def save(self) -> None:
        """Write a checkpoint; every worker takes part."""
        sums = torch.stack(self.workers.gather(self.progress.sums)).cpu()
        if self.workers.leads:
            progress = self.progress
            state = {
                "model": self.network.state_dict(),
                "optimizer": self.stepper.optimizer.state_dict(),
                "epoch": progress.epoch,
                "batch": progress.batch,
                "step": progress.step,
                "time_seconds": progress.time_seconds,
                "history": json.dumps(progress.history),
                "sums": sums,
            }
            save_checkpoint(self.directory.checkpoints, progress.step, state)

    def _load(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["model"])
        self.stepper.optimizer.load_state_dict(state["optimizer"])
        sums: Tensor = state["sums"]
        if len(sums) != self.workers.count:  # with another number of workers, the leader takes it all
            sums = torch.cat([sums.sum(0, keepdim=True), sums.new_zeros(self.workers.count - 1, sums.shape[1])])
        self.progress = Progress(
            epoch=state["epoch"],
            batch=state["batch"],
            step=state["step"],
            time_seconds=state["time_seconds"],
            history=json.loads(state["history"]),
            sums=sums[self.workers.rank].to(self.workers.device),
        )

    def _checkpoint_bytes(self) -> int:
        copies = {"sgd": 2, "adamw": 3}[self.experiment.optim.name]  # the weights and the optimizer's averages
        return copies * sum(int(t.nbytes) for t in self.network.state_dict().values())

    @contextmanager
    def _tensorboard(self) -> Iterator[Any]:
        if not self.workers.leads:
            yield None
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # Events of epochs that a killed session had begun are not shown twice.
        writer = SummaryWriter(str(self.directory.path / "tensorboard"), purge_step=self.progress.epoch + 1)
        try:
            yield writer
        finally:
            writer.close()


def _load_once(experiment: Experiment, workers: Workers, data_root: Path | None) -> Dataset:
    """Load the dataset; where it has to be downloaded, the leading worker does so first."""
    dataset = load_dataset(experiment.data, data_root=data_root) if workers.leads else None
    workers.wait()
    return dataset if dataset is not None else load_dataset(experiment.data, data_root=data_root)
