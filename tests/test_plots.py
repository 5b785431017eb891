"""Figures: they are drawn without a display, and without matplotlib the error says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from st_gsinfonce.plots import Curve, plot_sweep

CURVES = [
    Curve("Avg.", [8, 10, 12], [70.0, 71.0, 69.0], [0.5, 0.4, 0.6], baseline=69.5),
    Curve("STS-B dev", [8, 10, 12], [80.0, 81.0, 79.0], [None, None, None]),
]


def test_a_figure_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_sweep(tmp_path / "sweep.png", CURVES, "b", "Sweep")
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    plot_sweep(tmp_path / "sweep.svg", CURVES[:1], "b", "Sweep")
    text = (tmp_path / "sweep.svg").read_text(encoding="utf-8")
    assert "<svg" in text
    assert "matplotlib.pyplot" not in sys.modules  # no window, no global state


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'st_gsinfonce\[plot\]'"):
        plot_sweep(tmp_path / "sweep.png", CURVES, "b", "Sweep")
