"""One step of SAM where every number can be checked by hand.

For L(w) = (3 a^2 + b^2) / 2 at w = (1, 1) the gradient is g = (3, 1), the perturbation eps = rho g / |g|, and SAM goes
down the gradient at w + eps, which is (3, 1) * (w + eps).
"""

import torch

from flatmin import SAM

curvature = torch.tensor([3.0, 1.0])
w = torch.nn.Parameter(torch.ones(2))
opt = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5)


def closure():
    opt.zero_grad()
    loss = (curvature * w**2).sum() / 2
    loss.backward()
    return loss


loss = opt.step(closure)

eps = 0.5 * curvature / curvature.norm()
perturbed = ((curvature * (1 + eps) ** 2).sum() / 2).item()
a, b = (1 - 0.1 * curvature * (1 + eps)).tolist()
print("One step on L(w) = (3 a^2 + b^2) / 2 from w = (1, 1), with rho = 0.5 and lr = 0.1")
print(f"  loss at w          {loss.item():.4f}           by hand  2.0000")
print(f"  loss at w + eps    {opt.metrics.perturbed_loss.item():.4f}           by hand  {perturbed:.4f}")
print(f"  w after the step   {w[0].item():.4f}, {w[1].item():.4f}   by hand  {a:.4f}, {b:.4f}")
