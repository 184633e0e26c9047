"""Figures: the same bytes whatever matplotlib was set to before, and nothing changed afterwards."""

import io
import random
import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch
from campaign import thinned
from PIL import Image

from emrun.base.errors import MissingExtra
from emrun.hooks._shared.figures import DPI, check_matplotlib, drawn, figure, png


def picture(title="loss"):
    with figure(3, 2) as drawing:
        axes = drawing.subplots()
        axes.plot([1, 2, 3], [3, 1, 2])
        axes.set_title(title, parse_math=False)
        return drawn(drawing)


def settings_now():
    return {name: mpl.rcParams[name] for name in mpl.rcParams if name != "backend"}  # which is chosen when it is read


def test_pixels_and_their_png_are_the_same():
    pixels = picture()
    assert (pixels.shape, pixels.dtype) == ((2 * DPI, 3 * DPI, 3), np.uint8)
    assert pixels.min() < 50
    with Image.open(io.BytesIO(png(pixels))) as image:
        np.testing.assert_array_equal(np.asarray(image), pixels)
        assert image.info == {}  # no program, no time
    assert png(pixels) == png(picture())


def test_the_settings_and_the_random_states_of_the_process_play_no_part():
    before = png(picture())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    pyplot = sys.modules.get("matplotlib.pyplot")
    with mpl.rc_context({"axes.facecolor": "black", "font.size": 30, "figure.dpi": 20, "text.usetex": True}):
        settings = settings_now()
        assert png(picture()) == before
        assert settings_now() == settings
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert sys.modules.get("matplotlib.pyplot") is pyplot


def test_the_settings_are_restored_after_an_error():
    settings = settings_now()
    with pytest.raises(KeyError), figure(3, 2):
        mpl.rcParams["font.size"] = 40
        raise KeyError
    assert settings_now() == settings


@pytest.mark.parametrize("title", thinned(["$x_{", "猫 🐱", "a$b$c", "%s {0}", "\\alpha"], ["$x_{", "猫 🐱"]))
def test_any_text_can_be_drawn(title):
    assert picture(title).shape == picture().shape


def test_without_matplotlib_the_error_has_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"SaveConfusionMatrix needs matplotlib.*pip install 'emrun\[plots\]'"):
        check_matplotlib("SaveConfusionMatrix")
