"""skorch: a net whose optimizer is SAM; skorch hands it a closure."""

# --8<-- [start:net]
import torch
from skorch import NeuralNetClassifier
from torch import nn

from flatmin import SAM


class SAMNet(NeuralNetClassifier):
    def __init__(self, *args, rho=0.05, **kwargs):
        super().__init__(*args, **kwargs)
        self.rho = rho

    def initialize_optimizer(self, *args, **kwargs):
        super().initialize_optimizer(*args, **kwargs)
        self.optimizer_ = SAM(self.optimizer_, rho=self.rho, model=self.module_)
        return self

    def set_params(self, **params):
        super().set_params(**params)
        if "rho" in params and self.initialized_:
            self.optimizer_.rho = self.rho
        return self


# --8<-- [end:net]


def make_data():
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(dim=1)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


def main(num_epochs=2):
    net = SAMNet(
        make_model(),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.1,
        rho=0.1,
        batch_size=32,
        max_epochs=num_epochs,
        train_split=None,
        verbose=0,
    )
    return net.fit(*make_data())


if __name__ == "__main__":
    print(main().history[-1, "train_loss"])
