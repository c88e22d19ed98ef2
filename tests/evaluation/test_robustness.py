"""Image corruptions against Pillow and scipy."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from vitral.data.variable_images import VariableSizeImages
from vitral.device.threads import thread_count
from vitral.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt, corruption_inputs, jpeg_roundtrip, rotate
from vitral.evaluation.robustness import measure_robustness, predict_corrupted


@pytest.mark.parametrize("shape", [(5, 1, 28, 28), (300, 1, 9, 20), (3, 3, 32, 32), (2, 3, 130, 141), (2, 4, 16, 16)])
@pytest.mark.parametrize("quality", [50, 5])
def test_a_jpeg_mosaic_equals_separate_files(shape: tuple[int, ...], quality: int) -> None:
    images = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    compressed = jpeg_roundtrip(images, quality)
    assert compressed.shape == images.shape
    is_picture = shape[1] in (1, 3)  # other channel counts are compressed plane by plane
    for image, result in zip(images[:5], compressed[:5], strict=True):
        planes, results = ([image], [result]) if is_picture else (list(image[:, None]), list(result[:, None]))
        for plane, actual in zip(planes, results, strict=True):
            file = io.BytesIO()
            array = plane.permute(1, 2, 0).squeeze(2).contiguous().numpy()
            Image.fromarray(array).save(file, "JPEG", quality=quality, subsampling=0)
            expected = torch.from_numpy(np.array(Image.open(file))).reshape(*plane.shape[1:], -1).permute(2, 0, 1)
            assert torch.equal(actual, expected)


def test_blur_agrees_with_scipy() -> None:
    images = torch.randint(0, 256, (4, 2, 20, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    blurred = corrupt(images, "blur", 0.05)
    for image, actual in zip(images.flatten(0, 1), blurred.flatten(0, 1), strict=True):
        expected = ndimage.gaussian_filter(image.double().numpy(), sigma=1.0, mode="nearest", truncate=4)
        assert np.abs(actual.numpy() - expected).max() <= 0.51


def test_rotation_by_90_degrees_is_exact() -> None:
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    quarter = torch.tensor([torch.pi / 2], dtype=torch.float64)
    torch.testing.assert_close(rotate(image, quarter), image.rot90(1, dims=(2, 3)))


def test_rotation_of_rectangular_images_agrees_with_scipy() -> None:
    image = torch.rand(1, 1, 20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual = rotate(image, torch.deg2rad(torch.tensor([15.0], dtype=torch.float64)))[0, 0].numpy()
    expected = ndimage.rotate(image[0, 0].numpy(), 15, reshape=False, order=1, mode="nearest")
    assert np.abs(actual - expected).max() < 1e-6


def test_noise_has_its_standard_deviation_and_is_deterministic() -> None:
    grey = torch.full((50, 1, 20, 20), 128, dtype=torch.uint8)
    noisy = corrupt(grey, "noise", 0.08)
    assert (noisy.float() / 255).std().item() == pytest.approx(0.08, rel=0.05)
    assert torch.equal(noisy, corrupt(grey, "noise", 0.08))


def test_contrast_scales_the_distance_from_the_mean() -> None:
    image = torch.tensor([0, 100, 200, 100], dtype=torch.uint8).view(1, 1, 2, 2)
    assert corrupt(image, "contrast", 0.5).flatten().tolist() == [50, 100, 150, 100]


def test_an_unknown_corruption_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown corruption 'rust'"):
        corrupt(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), "rust", 1)


def test_robustness_is_the_accuracy_relative_to_clean_images() -> None:
    images = torch.full((40, 1, 16, 16), 60, dtype=torch.uint8)
    images[::2] = 190
    labels = (torch.arange(40) % 2 == 0).long()
    by_brightness = measure_robustness(images, labels, lambda x: (x[:].float().mean(dim=(1, 2, 3)) > 125).long())
    assert by_brightness.clean_accuracy == 1
    assert by_brightness.relative_accuracy.value == 1
    assert [result.corruption for result in by_brightness.corruptions] == list(SEVERITIES)
    constant = measure_robustness(images, labels, lambda x: torch.ones(len(x), dtype=torch.long))
    assert constant.clean_accuracy == 0.5
    assert constant.relative_accuracy.value == pytest.approx(1)
    assert constant.corruptions[0].accuracy[0].low < 0.5 < constant.corruptions[0].accuracy[0].high


@pytest.mark.parametrize("shape", [(40, 3, 8, 8), (37, 1, 9, 9), (20, 3, 130, 141)])
def test_random_numbers_do_not_depend_on_the_batch_size(shape: tuple[int, ...]) -> None:
    images = torch.zeros(shape, dtype=torch.uint8)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    direction = 2 * torch.randint(2, shape[:1], generator=torch.Generator().manual_seed(0)) - 1
    inputs = list(corruption_inputs(images, batch_size=16))
    assert len(inputs) > 1
    assert torch.equal(torch.cat([batch.noise for batch in inputs]), noise)
    assert torch.equal(torch.cat([batch.direction for batch in inputs]), direction)


def test_threads_and_known_predictions_do_not_change_the_result() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (300, 1, 12, 12), generator=generator, dtype=torch.uint8)
    labels = torch.randint(3, (300,), generator=generator)

    def predict(batch: Tensor) -> Tensor:
        return batch.flatten(1).float().std(dim=1).long() % 3

    completed: list[int] = []
    expected = measure_robustness(images, labels, predict, in_parallel=False)
    with thread_count(2):
        result = measure_robustness(images, labels, predict, clean_N=predict(images), progress=completed.append)
    assert result == expected
    assert completed[-1] == len(images) * len(CORRUPTIONS)


def test_images_of_several_sizes_keep_their_order() -> None:
    images = VariableSizeImages.stack([torch.full((1, 8 + n % 3, 8), 20 * n, dtype=torch.uint8) for n in range(12)])

    def predict(batch: Tensor) -> Tensor:
        return (batch.float().mean(dim=(1, 2, 3)) / 20).round().long()

    predicted = predict_corrupted(images, predict, in_parallel=True)
    is_contrast = [kind == "contrast" for kind, _ in CORRUPTIONS]
    assert (predicted[:, is_contrast] == torch.arange(12)[:, None]).all()  # uniform images have no contrast to lose
