"""Augmentation against slow, obvious references, image by image."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flatmin.lab.data import augment
from flatmin.lab.data.augment import Draw
from flatmin.lab.data.autoaugment import SIGNED, _strength, apply_operation, auto_augment, draw_operations, policy_pairs
from flatmin.lab.data.images import middle_box, padded_middle_box, random_crop_box
from flatmin.lab.data.torchvision_operators import torchvision


def some_images(n=12, channels=3, size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Smooth images: on noise, half a pixel changes everything.
    coarse = torch.randint(0, 256, (n, channels, 5, 5), generator=generator).float()
    return F.interpolate(coarse, size=(size, size), mode="bilinear").to(torch.uint8)


def draw(n=12, seed=0, epoch=1):
    return Draw(seed=seed, epoch=epoch, examples=np.arange(100, 100 + n))


def test_basic_augmentation_is_flip_pad_and_crop_image_by_image():
    images = some_images(200, size=8)
    out = augment.flip_and_crop(images, augment.draw_crops(draw(200)))
    seen = set()
    for image, result in zip(images, out, strict=True):
        found = [
            (flip, row, column)
            for flip in (False, True)
            for row in range(9)
            for column in range(9)
            if torch.equal(
                F.pad(image.flip(-1) if flip else image, (4,) * 4)[:, row : row + 8, column : column + 8],
                result,
            )
        ]
        assert found
        seen.add(found[0])
    assert {flip for flip, _, _ in seen} == {False, True}
    assert {row for _, row, _ in seen} == set(range(9))
    assert {column for _, _, column in seen} == set(range(9))


AUGMENTATIONS = [
    lambda x, d: augment.flip_and_crop(x, augment.draw_crops(d)),
    lambda x, d: auto_augment(x, *draw_operations(d, "cifar10", x.shape[-2:])),
    lambda x, d: augment.cutout(x.float(), augment.draw_cutouts(d, 32, 32), 16),
]


@pytest.mark.parametrize("change", AUGMENTATIONS, ids=["basic", "autoaugment", "cutout"])
def test_an_image_is_augmented_the_same_in_any_batch_and_differently_in_another_epoch(change):
    images = some_images(40)
    whole = change(images.clone(), draw(40))
    picked = np.array([31, 4, 17])
    part = change(images[picked], Draw(seed=0, epoch=1, examples=100 + picked))
    assert torch.equal(whole[picked], part)
    later = change(images.clone(), draw(40, epoch=2))
    assert sum(torch.equal(a, b) for a, b in zip(whole, later, strict=True)) < 20
    other_seed = change(images.clone(), draw(40, seed=1))
    assert not torch.equal(whole, other_seed)


def test_normalize_is_the_formula_and_channels_last():
    images = some_images()
    out = augment.normalize(images, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    for c in range(3):
        expected = (images[:, c].double() / 255 - (0.1, 0.2, 0.3)[c]) / (0.5, 0.6, 0.7)[c]
        torch.testing.assert_close(out[:, c].double(), expected, rtol=1e-5, atol=1e-6)
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("size", [1, 5, 16])
def test_cutout_blanks_one_square_around_a_uniform_centre(size):
    images = torch.ones(500, 1, 9, 9)
    out = augment.cutout(images.clone(), augment.draw_cutouts(draw(500), 9, 9), size)
    centers = set()
    for image in out[:, 0]:
        rows, columns = (image == 0).any(1).nonzero().flatten(), (image == 0).any(0).nonzero().flatten()
        # A rectangle, cut off at the border, and nothing else.
        expected = torch.ones(9, 9)
        expected[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = 0
        assert torch.equal(image, expected)
        assert len(rows) <= size
        if size == 1:
            centers.add((int(rows[0]), int(columns[0])))
    if size == 1:
        assert len(centers) == 81
    if size == 5:  # the center is in a corner for some image: 3 of 5 pixels remain
        assert (out == 0).sum((1, 2, 3)).min() == 9
        assert (out == 0).sum((1, 2, 3)).max() == 25


def test_a_shared_cutout_mask_is_the_same_for_the_whole_batch():
    out = augment.cutout(torch.ones(20, 3, 32, 32), augment.draw_cutouts(draw(20), 32, 32, shared=True), 16)
    assert all(torch.equal(image, out[0]) for image in out)


@pytest.mark.parametrize("policy", ["cifar10", "svhn", "imagenet"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_of_a_policy_equals_torchvisions_on_the_single_image(policy, channels):
    reference = torchvision.transforms.autoaugment
    images = some_images(4, channels)
    space = reference.AutoAugment()._augmentation_space(10, (32, 32))
    for operation, _, level in {step for pair in policy_pairs(policy) for step in pair}:
        magnitudes, signed = space[operation]
        assert signed == (operation in SIGNED)
        strength = float(magnitudes[level]) if level is not None else 0.0
        assert _strength(operation, level, images.shape[-2:]) == pytest.approx(strength, abs=1e-4)
        for sign in (-1, 1) if signed else (1,):
            together = apply_operation(images, operation, sign * strength)
            for image, result in zip(images, together, strict=True):
                nearest = torchvision.transforms.InterpolationMode.NEAREST
                alone = reference._apply_op(image, operation, sign * strength, nearest, None)
                assert torch.equal(alone, result), operation


def test_autoaugment_applies_the_drawn_pair_to_each_image():
    """A slow reference: for each image alone, look up what it drew, and apply that."""
    from flatmin.lab.data.randomness import Purpose

    images = some_images(60)
    keys = draw(60)
    pairs = policy_pairs("cifar10")
    chosen = keys.integers(25, Purpose.POLICY)
    expected = []
    for i, image in enumerate(images):
        result = image[None]
        for stage in range(2):
            operation, probability, level = pairs[int(chosen[i])][stage]
            if keys.uniform(Purpose.POLICY_APPLIED, stage)[i] < probability:
                strength = _strength(operation, level, image.shape[-2:])
                if operation in SIGNED and keys.integers(2, Purpose.POLICY_SIGN, stage)[i]:
                    strength = -strength
                result = apply_operation(result, operation, strength)
        expected.append(result[0])
    found = auto_augment(images, *draw_operations(keys, "cifar10", images.shape[-2:]))
    assert torch.equal(found, torch.stack(expected))
    assert len(set(chosen.tolist())) > 15


def test_mixups_weight_has_the_moments_of_the_beta_distribution():
    """Var Beta(a, a) = 1 / (4 (2 a + 1))."""
    for alpha in (1.0, 8.0):
        weights = np.array([augment.mixup_weight(alpha, 0, 0, batch) for batch in range(4000)])
        variance = 1 / (4 * (2 * alpha + 1))
        assert abs(weights.mean() - 0.5) < 4 * math.sqrt(variance / len(weights))
        assert weights.var() == pytest.approx(variance, rel=0.1)
    assert augment.mixup_weight(0.0, 0, 0, 0) == 1.0


def test_resize_gives_the_asked_size_and_leaves_constants_alone():
    assert torch.allclose(augment.resize(torch.full((2, 3, 32, 32), 0.3), 48), torch.full((2, 3, 48, 48), 0.3))
    same = torch.rand(1, 3, 32, 32)
    assert augment.resize(same, 32) is same


def test_bicubic_enlarging_is_exact_for_a_line_and_overshoots_at_an_edge():
    line = torch.arange(8.0).expand(1, 1, 8, 8)
    enlarged = augment.resize(line, 16, "bicubic")[0, 0, 0]
    assert torch.allclose(enlarged[4:12], (torch.arange(16.0)[4:12] + 0.5) / 2 - 0.5, atol=1e-5)
    edge = (line > 3).float()
    assert augment.resize(edge, 16, "bicubic").max() > 1.01
    assert augment.resize(edge, 16).max() <= 1


def test_the_middle_box_is_the_middle_of_the_shorter_side():
    left, top, right, bottom = middle_box(500, 375)
    assert right - left == bottom - top == pytest.approx(375 * 224 / 256)
    assert (left + right, top + bottom) == (500, 375)


@pytest.mark.parametrize(("size", "fraction"), [(224, 0.875), (475, 475 / 507), (600, 600 / 632)])
def test_the_reference_codes_middle_box_is_larger_for_larger_inputs(size, fraction):
    left, top, right, bottom = padded_middle_box(501, 375, size, 32)
    assert right - left == bottom - top == math.floor(fraction * 375)
    assert abs(left + right - 501) <= 1
    assert abs(top + bottom - 375) <= 1


def test_random_boxes_lie_inside_and_have_allowed_areas_and_ratios():
    generator = np.random.default_rng(0)
    areas = []
    for _ in range(2000):
        left, top, right, bottom = random_crop_box(500, 375, generator.random(40).tolist())
        assert 0 <= left < right <= 500
        assert 0 <= top < bottom <= 375
        areas.append((right - left) * (bottom - top) / (500 * 375))
        assert 3 / 4 - 0.02 <= (right - left) / (bottom - top) <= 4 / 3 + 0.02
    assert min(areas) < 0.1
    assert max(areas) > 0.9


def test_an_image_too_long_for_every_try_gives_its_middle():
    assert random_crop_box(1000, 10, [0.99, 0.5, 0.5, 0.5] * 10) == (493, 0, 506, 10)
