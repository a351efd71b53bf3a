# SPDX-License-Identifier: Apache-2.0
"""A retention map as SVG or PNG: one row per KV head, positions from left to right.

Both are drawn from one figure of rectangles and texts, so they show the same. The four colours
also differ in lightness: they survive colour blindness and grey printing.
"""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from randkv.errors import RandKVError
from randkv.retention import RetentionMap

PROMPT = 0x222222
KEPT = 0x0072B2
NEWEST = 0xE69F00
EVICTED = 0xE4E4E4
_INK = 0x222222
_PAPER = 0xFFFFFF

PNG_SCALE = 2
"""Pixels per unit of the figure."""
LEFT, TOP = 96, 96
"""Where the first row starts; units."""
_RIGHT = 40
_BOTTOM = 56
_MAX_PLOT_WIDTH = 1200
_MIN_PLOT_WIDTH = 640
_MAX_CELL_WIDTH = 16
_MAX_CELLS = 2**16
_PLOT_HEIGHT = 640
_MAX_ROW_PITCH = 24
_MIN_LABEL_PITCH = 14
_MIN_TICK_PITCH = 80
_MAX_SHOWN_KEY = 60
_FONT_SIZE = 13


@dataclass(frozen=True, slots=True)
class _Rect:
    x: int
    y: int
    width: int
    height: int
    colour: int


@dataclass(frozen=True, slots=True)
class _Text:
    """`y` is the baseline; `anchor` says which end of the text is at `x`."""

    x: int
    y: int
    text: str
    anchor: Literal["start", "middle", "end"] = "start"


@dataclass(frozen=True, slots=True)
class _Figure:
    width: int
    height: int
    rects: list[_Rect]
    texts: list[_Text]


def _shown_key(request_key: str) -> str:
    """ASCII, so that both fonts have every glyph and XML allows every character."""
    text = ascii(request_key)
    return text if len(text) <= _MAX_SHOWN_KEY else f"{text[:_MAX_SHOWN_KEY]}..."


def _headline(of: RetentionMap) -> str:
    return f"Retention of {_shown_key(of.request_key)}, layer {of.layer}"


def _summary(of: RetentionMap) -> str:
    return (
        f"budget {of.config.budget:,}, buffer {of.config.buffer_size:,}, {of.rounds:,} rounds: "
        f"each KV head holds {of.physical_tokens:,} physical of {of.computed_tokens:,} tokens"
    )


def _legend(of: RetentionMap) -> list[tuple[int, str]]:
    newest = of.computed_tokens - of.newest_from
    return [
        (PROMPT, f"prompt {of.prompt_tokens:,}"),
        (KEPT, f"kept {of.physical_tokens - of.prompt_tokens - newest:,}"),
        (NEWEST, f"newest (buffer) {newest:,}"),
        (EVICTED, f"evicted {of.evicted_tokens:,}"),
    ]


def _columns(of: RetentionMap) -> int:
    """Cells per row: one per position, or fewer where they would be too many to draw."""
    narrowest = -(-_MAX_PLOT_WIDTH * of.num_kv_heads // _MAX_CELLS)
    return min(of.computed_tokens, _MAX_PLOT_WIDTH // narrowest)


def _cells(of: RetentionMap, columns: int) -> NDArray[np.int64]:
    """Colours ``[num_kv_heads, columns]``; a cell blends the colours of its positions."""
    starts = np.arange(columns) * of.computed_tokens // columns
    counts = np.diff(starts, append=of.computed_tokens)
    position = np.arange(of.computed_tokens)
    is_prompt, is_newest = position < of.prompt_tokens, position >= of.newest_from
    fixed = [np.add.reduceat(mask, starts, dtype=np.int64) for mask in (is_prompt, is_newest)]
    held = np.add.reduceat(of.kept, starts, axis=1, dtype=np.int64)
    shares = (
        (PROMPT, fixed[0]),
        (KEPT, held - fixed[0] - fixed[1]),
        (NEWEST, fixed[1]),
        (EVICTED, counts - held),
    )
    cells = np.zeros(held.shape, np.int64)
    for shift in (16, 8, 0):
        total = sum(share * (colour >> shift & 0xFF) for colour, share in shares)
        cells |= (total + counts // 2) // counts << shift
    return cells


def _rows(cells: NDArray[np.int64], cell_width: int, pitch: int) -> list[_Rect]:
    """Equal neighbours become one rectangle."""
    height = pitch - pitch // 6
    rects = []
    for head, row in enumerate(cells):
        starts = np.flatnonzero(np.diff(row, prepend=-1)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(row)], strict=True):
            rects.append(
                _Rect(
                    LEFT + start * cell_width,
                    TOP + head * pitch,
                    (stop - start) * cell_width,
                    height,
                    int(row[start]),
                )
            )
    return rects


def _step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10


def _figure(of: RetentionMap) -> _Figure:
    columns = _columns(of)
    cell_width = min(_MAX_CELL_WIDTH, _MAX_PLOT_WIDTH // columns)
    plot_width = columns * cell_width
    pitch = max(1, min(_MAX_ROW_PITCH, _PLOT_HEIGHT // of.num_kv_heads))
    bottom = TOP + of.num_kv_heads * pitch
    width = LEFT + max(plot_width, _MIN_PLOT_WIDTH) + _RIGHT
    rects = _rows(_cells(of, columns), cell_width, pitch)
    texts = [_Text(LEFT, 24, _headline(of)), _Text(LEFT, 44, _summary(of))]

    x = LEFT
    for colour, label in _legend(of):
        rects.append(_Rect(x, 62, 12, 12, colour))
        texts.append(_Text(x + 18, 73, label))
        x += 40 + 7 * len(label)

    for head in range(0, of.num_kv_heads, _step(_MIN_LABEL_PITCH / pitch)):
        middle = TOP + head * pitch + (pitch - pitch // 6) // 2
        texts.append(_Text(LEFT - 8, middle + 5, f"KV head {head}", "end"))

    tick_step = _step(_MIN_TICK_PITCH * of.computed_tokens / plot_width)
    for position in range(0, of.computed_tokens + 1, tick_step):
        x = LEFT + position * plot_width // of.computed_tokens
        rects.append(_Rect(x, bottom + 2, 1, 5, _INK))
        texts.append(_Text(x, bottom + 21, f"{position:,}", "middle"))
    unit = "position (tokens)"
    if columns < of.computed_tokens:
        per_column = of.computed_tokens / columns
        unit += f"; a column blends the colours of about {per_column:,.1f} positions"
    texts.append(_Text(LEFT, bottom + 42, unit))
    return _Figure(width, bottom + _BOTTOM, rects, texts)


def to_svg(of: RetentionMap) -> str:
    """A standalone SVG document; at most about a megabyte."""
    figure = _figure(of)
    paths: dict[int, list[str]] = defaultdict(list)
    for r in figure.rects:
        paths[r.colour].append(f"M{r.x} {r.y}h{r.width}v{r.height}h-{r.width}z")
    legend = ", ".join(label for _, label in _legend(of))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{figure.width}" '
        f'height="{figure.height}" viewBox="0 0 {figure.width} {figure.height}" '
        f'font-family="sans-serif" font-size="{_FONT_SIZE}" fill="#{_INK:06x}">',
        f"<title>{escape(_headline(of))}</title>",
        f"<desc>{escape(_summary(of))}: {escape(legend)}</desc>",
        f'<path fill="#{_PAPER:06x}" d="M0 0h{figure.width}v{figure.height}h-{figure.width}z"/>',
        '<g shape-rendering="crispEdges">',
        *(f'<path fill="#{colour:06x}" d="{"".join(d)}"/>' for colour, d in paths.items()),
        "</g>",
        *(
            f'<text x="{t.x}" y="{t.y}" text-anchor="{t.anchor}">{escape(t.text)}</text>'
            for t in figure.texts
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def to_png(of: RetentionMap) -> bytes:
    """The same picture, `PNG_SCALE` pixels per unit.

    Raises:
        RandKVError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise RandKVError(
            "A PNG picture needs Pillow, which is not installed. Install pillow, or ask for SVG."
        ) from None
    figure = _figure(of)
    scale = PNG_SCALE
    image = Image.new("RGB", (figure.width * scale, figure.height * scale), f"#{_PAPER:06x}")
    draw = ImageDraw.Draw(image)
    for r in figure.rects:
        corner = (r.x + r.width) * scale - 1, (r.y + r.height) * scale - 1
        draw.rectangle((r.x * scale, r.y * scale, *corner), fill=f"#{r.colour:06x}")
    font = ImageFont.load_default(_FONT_SIZE * scale)
    anchors = {"start": "ls", "middle": "ms", "end": "rs"}
    for t in figure.texts:
        at = t.x * scale, t.y * scale
        draw.text(at, t.text, fill=f"#{_INK:06x}", font=font, anchor=anchors[t.anchor])
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()
