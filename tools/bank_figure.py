"""Pictures of bank conflicts as PNG files, with matplotlib (extra `plot`)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyruntime.cubin.banks import BANKS, Served
from pyruntime.errors import InputError

_COLUMNS, _MOST = 3, 60  # panels side by side, and in one file


def draw(path: Path, pictures: Sequence[tuple[str, Served]]) -> None:
    """Writes titled panels of lanes by banks, coloured by the wavefront that serves them.

    Raises:
        InputError: matplotlib is not installed, or there is nothing, or too much, to draw.
    """
    if not 0 < len(pictures) <= _MOST:
        raise InputError(f"{path}: {len(pictures)} pictures to draw, it takes 1 to {_MOST}")
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise InputError(f"{path}: needs matplotlib: pip install 'pyruntime-cuda[plot]'") from None
    columns = min(len(pictures), _COLUMNS)
    rows = math.ceil(len(pictures) / columns)
    figure = module.Figure(figsize=(5 * columns + 1, 5 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    most = max(max(served.ways) for _, served in pictures)
    for panel, (title, served) in zip(panels, pictures, strict=False):
        image = _panel(panel, title, served, most)
    for panel in panels[len(pictures) :]:
        panel.set_axis_off()
    if most > 1:
        ticks = range(1, most + 1, -(-most // 8))
        bar = {"label": "wavefront of its phase", "ticks": list(ticks), "aspect": 30, "shrink": 0.6}
        figure.colorbar(image, ax=panels, **bar)
    figure.savefig(path, format="png", dpi=110)


def _panel(axes: Any, title: str, served: Served, most: int) -> Any:
    """One picture; wavefronts 1 to `most` have colours of their own. Returns matplotlib's image."""
    lanes = len(served.addresses)
    cells = [[served.wavefront_of(lane, bank) or math.nan for bank in range(BANKS)]
             for lane in range(lanes)]  # fmt: skip
    colours = importlib.import_module("matplotlib").colormaps["viridis_r"].resampled(most)
    image = axes.imshow(cells, cmap=colours, vmin=0.5, vmax=most + 0.5, aspect="auto")
    axes.set_title(f"{title}\n{served.wavefronts} wavefronts, {served.ideal} at best", fontsize=10)
    axes.set_xlabel("bank")
    axes.set_ylabel("lane")
    axes.set_xticks(range(0, BANKS, 4))
    axes.set_yticks(range(0, lanes, 4))
    for first in range(served.access.phase, lanes, served.access.phase):
        axes.axhline(first - 0.5, color="black", linewidth=0.8)
    return image
