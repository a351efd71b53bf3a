# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from randkv import RandKVConfig, RandKVError
from randkv.retention import RetentionMap, retention_map
from randkv.retention_picture import (
    EVICTED,
    KEPT,
    LEFT,
    NEWEST,
    PNG_SCALE,
    PROMPT,
    TOP,
    to_png,
    to_svg,
)

SVG = "{http://www.w3.org/2000/svg}"
CELL, PITCH = 4, 24
"""Units per position and per KV head in the picture of `small`."""


def drawn(
    config: RandKVConfig, prompt_tokens: int, computed_tokens: int, kv_heads: int, key: str = "k"
) -> RetentionMap:
    return retention_map(
        config,
        request_key=key,
        prompt_tokens=prompt_tokens,
        computed_tokens=computed_tokens,
        layer=0,
        num_kv_heads=kv_heads,
    )


def small(key: str = "chat-42") -> RetentionMap:
    return drawn(RandKVConfig(64, 16), 20, 300, 8, key)


def pixels(png: bytes) -> np.ndarray:
    """One 0xRRGGBB number per unit of the figure, ``[height, width]``."""
    rgb = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    return rgb[::PNG_SCALE, ::PNG_SCALE] @ [1 << 16, 1 << 8, 1]


def painted(svg: str) -> np.ndarray:
    """What the rectangles of an SVG paint, like `pixels`; no texts."""
    root = ElementTree.fromstring(svg)
    paper = np.full((int(root.attrib["height"]), int(root.attrib["width"])), -1)
    for path in root.iter(f"{SVG}path"):
        matches = list(re.finditer(r"M(\d+) (\d+)h(\d+)v(\d+)h-\3z", path.attrib["d"]))
        assert "".join(m.group() for m in matches) == path.attrib["d"]
        for match in matches:
            x, y, width, height = map(int, match.groups())
            paper[y : y + height, x : x + width] = int(path.attrib["fill"][1:], 16)
    return paper


def expected_cells(of: RetentionMap) -> np.ndarray:
    cells = np.where(of.kept, KEPT, EVICTED)
    cells[:, : of.prompt_tokens] = PROMPT
    cells[:, of.newest_from :] = NEWEST
    return cells


@pytest.mark.parametrize("picture", ["svg", "png"])
def test_every_position_of_every_head_has_its_colour(picture: str) -> None:
    of = small()
    canvas = painted(to_svg(of)) if picture == "svg" else pixels(to_png(of))
    plot = canvas[TOP : TOP + 8 * PITCH, LEFT : LEFT + 300 * CELL]
    for x in (0, CELL - 1):
        assert plot[::PITCH, x::CELL].tolist() == expected_cells(of).tolist()
    assert (plot[PITCH - 1 :: PITCH] == 0xFFFFFF).all()


def test_both_pictures_show_the_same_when_columns_blend() -> None:
    of = drawn(RandKVConfig(200, 50), 100, 5000, 70)
    svg, png = painted(to_svg(of)), pixels(to_png(of))
    rows = slice(TOP, TOP + 70 * 9)
    width = svg.shape[1] - LEFT
    assert svg.shape == png.shape
    assert width > 1000
    assert (svg[rows, LEFT:] == png[rows, LEFT:]).all()
    assert len(np.unique(svg[rows, LEFT:])) > 8


def test_a_column_blends_kept_and_evicted_by_their_share() -> None:
    of = drawn(RandKVConfig(500, 100), 300, 6000, 2)  # 1200 columns of 5 positions
    row = painted(to_svg(of))[TOP, LEFT : LEFT + 1200]
    assert (row[:60] == PROMPT).all()
    assert (row[-20:] == NEWEST).all()
    share = of.kept[0].reshape(1200, 5).mean(axis=1)
    for shift in (16, 8, 0):
        kept, evicted = KEPT >> shift & 0xFF, EVICTED >> shift & 0xFF
        exact = share * kept + (1 - share) * evicted
        assert np.abs((row >> shift & 0xFF) - exact)[60:-20].max() <= 0.5


def test_the_legend_names_its_colours_and_counts() -> None:
    of = small()
    svg = to_svg(of)
    canvas = painted(svg)
    texts = {t.text: t for t in ElementTree.fromstring(svg).iter(f"{SVG}text") if t.text}
    kept = of.physical_tokens - 20 - 16
    for label, colour in (
        ("prompt 20", PROMPT),
        (f"kept {kept}", KEPT),
        ("newest (buffer) 16", NEWEST),
        (f"evicted {of.evicted_tokens}", EVICTED),
    ):
        at = texts[label].attrib
        assert canvas[int(at["y"]) - 5, int(at["x"]) - 10] == colour
    assert {"KV head 0", "KV head 7", "0", "20", "300", "position (tokens)"} <= set(texts)
    holds = f"{of.rounds} rounds: each KV head holds {of.physical_tokens} physical of 300 tokens"
    assert f"budget 64, buffer 16, {holds}" in texts


@pytest.mark.parametrize(
    "key",
    [
        "<script>alert(1)</script>&\"'",
        "]]>-->",
        "\0\x01\x1b\x7f\ufffe\uffff\u202e\r\n\t",
        "日本語 é 😀",
        "k" * 500,
        "&" * 500,
        "\\",
    ],
    ids=["markup", "end of cdata", "controls", "unicode", "long", "long markup", "backslash"],
)
def test_any_key_makes_a_picture_with_a_short_title(key: str) -> None:
    of = small(key)
    svg = to_svg(of)
    assert svg.isascii()
    root = ElementTree.fromstring(svg)
    assert {element.tag for element in root.iter()} == {
        SVG + tag for tag in ("svg", "title", "desc", "path", "g", "text")
    }
    assert root.attrib["role"] == "img"
    title = root.findtext(f"{SVG}title")
    assert title is not None
    assert ascii(key)[:60] in title
    assert len(title) < 100
    assert title in [t.text for t in root.iter(f"{SVG}text")]
    assert Image.open(io.BytesIO(to_png(of))).format == "PNG"


@pytest.mark.parametrize(
    ("config", "computed_tokens", "kv_heads"),
    [
        (RandKVConfig(300_000, 100_000), 2**20, 8),
        (RandKVConfig(700, 8), 1200, 50),
        (RandKVConfig(64, 64), 700, 1024),
        (RandKVConfig(1, 0), 1, 1),
    ],
)
def test_pictures_are_bounded(config: RandKVConfig, computed_tokens: int, kv_heads: int) -> None:
    of = drawn(config, 1, computed_tokens, kv_heads)
    svg = to_svg(of)
    assert len(svg) < 1_000_000
    root = ElementTree.fromstring(svg)
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    assert 700 < width < 1400
    assert height < 1200
    assert Image.open(io.BytesIO(to_png(of))).size == (width * PNG_SCALE, height * PNG_SCALE)
    for text in root.iter(f"{SVG}text"):
        assert 0 < int(text.attrib["x"]) < width
        assert 0 < int(text.attrib["y"]) < height


def test_a_png_without_pillow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RandKVError, match="Install pillow"):
        to_png(small())
