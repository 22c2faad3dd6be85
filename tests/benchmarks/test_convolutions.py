"""Convolutional networks: parameters and multiply-adds that are known of them."""

import pytest

from benchmarks.layers import inception_v3, resnet, vgg16


@pytest.mark.parametrize(
    ("layers", "parameters", "giga"),
    [
        (vgg16, 138_357_544, 15.47),
        (lambda batch: resnet(50, batch), 25_557_032, 4.09),
        (lambda batch: resnet(101, batch), 44_549_160, 7.80),
        (lambda batch: resnet(152, batch), 60_192_808, 11.51),
        (inception_v3, 23_834_568, 5.71),
    ],
)
def test_networks_are_those_of_torchvision(layers, parameters, giga):
    assert sum(layer.parameters for layer in layers(1)) == parameters
    assert sum(layer.operations for layer in layers(3)) / 3 / 2e9 == pytest.approx(giga, abs=0.005)


def test_most_of_vgg_is_in_a_layer_that_comes_early_in_backward():
    largest = max(vgg16(1), key=lambda layer: layer.parameters)
    assert largest.unit == "fc6" and largest.parameters * 4 == pytest.approx(411e6, rel=0.001)
