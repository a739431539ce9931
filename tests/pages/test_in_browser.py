"""The pages as a reader sees them, in a real browser: what is drawn, what is said, what happens under the mouse."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.pages.browser import BROWSER, Tab, browser_tab
from uniprefill_jax.bench.report import build_report
from uniprefill_jax.cli import main
from uniprefill_jax.demo.document import FACT

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# The setting of the demo.
RULE = "--top-p 0.8 --score peak --score-memory 0.5 --top-p-over candidates"
DROP_LAYERS = (7, 11, 15, 19, 23, 27)
NARROW = 420

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def tab(folder: Path) -> Iterator[Tab]:
    with browser_tab(folder / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def explanation(folder: Path) -> Path:
    """The page of the demo's document, as the command writes it."""
    path = folder / "explain.html"
    with pytest.raises(SystemExit, match="0"):
        main(f"explain smollm2-135m --demo --runs 1 {RULE} --html {path}".split())
    return path


@pytest.fixture(scope="module")
def report(folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(build_report(RESULTS)[0])
    return path


def colours_of(picture: np.ndarray, box: tuple[float, float, float, float]) -> int:
    """How many colours there are in a part of a screenshot."""
    left, top, width, height = (round(value) for value in box)
    part = picture[max(top, 0) : top + height, max(left, 0) : left + width]
    assert part.size, f"{box} is not in the picture"
    return len(np.unique(np.round(part.reshape(-1, 3) * 255), axis=0))


def check_explanation(tab: Tab) -> None:
    """The heat map is drawn and says something, the text is there, what was dropped is dim."""
    assert tab.problems == []
    for layer in DROP_LAYERS:
        lane = f'#heat-map [data-layer="{layer}"]'
        _, _, width, height = tab.box(f"{lane} svg")
        assert width > 100 and height > 10, layer
        # A block is one colour, and blocks differ.
        assert tab.evaluate(f"document.querySelectorAll('{lane} rect').length") >= 5
    picture = tab.screenshot(whole=True)
    assert colours_of(picture, tab.box('#heat-map [data-layer="7"] svg')) >= 20
    assert colours_of(picture, tab.box("#heat-map")) >= 50
    text = tab.evaluate("document.getElementById('document').innerText")
    assert FACT in text and len(text) > 10_000
    assert colours_of(picture, tab.box("#document")) >= 20
    dim, bright = (brightness(tab, f"#document .d{depth}") for depth in (0, len(DROP_LAYERS)))
    paper = brightness(tab, "body", "backgroundColor")
    assert abs(dim - paper) < 0.75 * abs(bright - paper), "what left early is closer to the paper"
    assert abs(dim - paper) > 0.25, "and can still be read"


def brightness(tab: Tab, selector: str, style: str = "color") -> float:
    """Of the first such element's colour, from 0 to 1."""
    # A canvas tells what any notation of a colour comes to.
    script = f"""(() => {{
        const pen = document.createElement("canvas").getContext("2d", {{willReadFrequently: true}});
        pen.fillStyle = getComputedStyle(document.querySelector({selector!r})).{style};
        pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data];
    }})()"""
    return float(np.mean(tab.evaluate(script)[:3])) / 255


def overflow(tab: Tab) -> float:
    """By how much the page is wider than its window."""
    return tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_explanation(tab: Tab, explanation: Path, scheme: str) -> None:
    tab.open(explanation, scheme=scheme)
    check_explanation(tab)
    assert overflow(tab) == 0
    tab.open(explanation, width=NARROW, scheme=scheme)
    assert tab.problems == [] and overflow(tab) == 0
    left, _, width, _ = tab.box("#heat-map svg")
    assert width > 150 and left + width <= NARROW


def test_pointing_at_a_block_tells_its_scores_and_clicking_finds_its_text(tab: Tab, explanation: Path) -> None:
    tab.open(explanation)
    block = "#heat-map [data-layer='7'] rect.here"
    # One from the middle that left at the first drop layer.
    found = tab.evaluate("""(() => {
        const data = JSON.parse(document.getElementById("data").textContent);
        const gone = data.passages.map((passage, number) => [passage, number])
            .filter(([passage]) => !passage.kept[0] && passage.start > 1000);
        const [passage, number] = gone[0];
        document.querySelector(`#heat-map [data-layer="7"] [data-passage="${number}"]`).classList.add("here");
        return {number, start: passage.start, mass: data.drops[0].block_mass[passage.blocks[0]]};
    })()""")
    shown = "getComputedStyle(document.getElementById('tip')).display"
    assert tab.evaluate(shown) == "none"
    left, top, width, height = tab.box(block)
    tab.point_at(left + width / 2, top + height / 2)
    tab.wait_until(f"{shown} === 'block'")
    tip = tab.evaluate("document.getElementById('tip').innerText")
    assert f"Tokens {found['start']:,} to" in tip and "leaves" in tip and "stays" not in tip
    score = re.search(r"([\d.]+)%", tip)
    assert score is not None and float(score[1]) == pytest.approx(100 * found["mass"], rel=0.01)
    x, y, wide, high = tab.box("#tip")
    assert x >= 0 and y >= 0 and x + wide <= 1280 and y + high <= 900
    assert colours_of(tab.screenshot(), (x, y, wide, high)) >= 5

    tab.point_at(left + width / 2, top + height / 2, click=True)
    passage = f"#document [data-passage='{found['number']}']"
    position = f"document.querySelector({passage!r}).getBoundingClientRect()"
    tab.wait_until(f"{position}.top >= 0 && {position}.bottom <= window.innerHeight")
    tab.point_at(2, 2)
    tab.wait_until(f"{shown} === 'none'")


def test_report(tab: Tab, report: Path) -> None:
    for width in (1280, NARROW):
        tab.open(report, width=width)
        assert tab.problems == [] and overflow(tab) == 0
        plots = tab.evaluate("document.querySelectorAll('figure svg').length")
        assert plots >= 5
    tab.open(report)
    picture = tab.screenshot(whole=True)
    boxes = tab.evaluate("""[...document.querySelectorAll("figure svg")].map(plot => {
        const box = plot.getBoundingClientRect();
        return [box.left, box.top, box.width, box.height];
    })""")
    assert min(colours_of(picture, box) for box in boxes) >= 10
    for words in ("llama-3.1-8b", "NVIDIA H200", "transformers", "top_p 0.5", "block_score"):
        assert words in tab.evaluate("document.body.innerText"), words
    tab.evaluate("document.querySelector('summary').click()")
    tab.wait_until("document.querySelector('details[open] td') !== null")


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('id="data">{', 'id="data">{,'),  # the script fails
        ("</style>", "#heat-map svg { display: none; }</style>"),
        ("</style>", ".scores rect { fill: white; }</style>"),
        ("</style>", "#document { display: none; }</style>"),
        ("</style>", ".passage { color: var(--ink) !important; }</style>"),  # nothing is dimmed
        ("</main>", '<img src="http://127.0.0.1:9/x.png"></main>'),  # the policy refuses it
    ],
)
def test_a_broken_page_is_noticed(tab: Tab, explanation: Path, folder: Path, good: str, bad: str) -> None:
    text = explanation.read_text()
    assert text.count(good) == 1
    (folder / "broken.html").write_text(text.replace(good, bad))
    tab.open(folder / "broken.html")
    with pytest.raises(AssertionError):
        check_explanation(tab)
