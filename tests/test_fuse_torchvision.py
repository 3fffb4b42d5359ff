"""Models from outside: torchvision's, and a generator. What cannot be fused must pass through."""

import pytest
import torch
from fusing import assert_same, fused
from torch import nn


def test_segmentation_models_pass_through():
    models = pytest.importorskip("torchvision.models.segmentation")
    for build in (models.fcn_resnet50, models.lraspp_mobilenet_v3_large):
        model = build(weights=None, weights_backbone=None, num_classes=3).eval()
        other, report = fused(model)
        assert not report.entries
        assert type(other) is type(model)
        assert list(other.state_dict()) == list(model.state_dict())
        x = torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            want, have = model(x), other(x)
        assert list(want) == list(have)
        for name in want:
            assert torch.equal(want[name], have[name])


def test_mask_head_keeps_its_convolution():
    """Its transposed convolution is followed by a ReLU."""
    detection = pytest.importorskip("torchvision.models.detection.mask_rcnn")
    model = detection.MaskRCNNPredictor(4, 3, 2).double()
    other, report = fused(model)
    assert [entry.fused for entry in report.entries] == [False]
    assert "got ReLU" in report.entries[0].detail
    assert_same(model, other, torch.randn(1, 4, 5, 5, dtype=torch.float64))


def test_a_generator_passes_through():
    def block(c_in, c_out, *settings):
        layer = nn.ConvTranspose2d(c_in, c_out, 4, *settings, bias=False)
        return [layer, nn.BatchNorm2d(c_out), nn.ReLU(True)]

    model = nn.Sequential(
        *block(6, 8, 1, 0), *block(8, 4, 2, 1), nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Tanh()
    ).double()
    other, report = fused(model)
    assert type(other) is nn.Sequential
    assert [entry.where for entry in report.left_alone] == ["0", "3", "6"]
    assert_same(model, other, torch.randn(2, 6, 1, 1, dtype=torch.float64), tolerance=1e-9)
