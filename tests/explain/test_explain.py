"""`uniprefill explain`: the page says what the prefill did, token by token, and nothing in a prompt can act on it."""

import json
from functools import cache

import numpy as np
import pytest

import uniprefill_jax as up
from tests.engine.tiny import tiny
from tests.pages.parsed import Element, Page
from uniprefill_jax.cli import main
from uniprefill_jax.explain.gather import Mark, explain_prefill
from uniprefill_jax.explain.measure import Timing
from uniprefill_jax.explain.page import Provenance, explanation_page
from uniprefill_jax.explain.text import token_pieces
from uniprefill_jax.tokenizer import load_tokenizer

FIRST, LAST = ord(" "), ord("~")
INJECTION = "</span></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7*7 }} &amp; "
WORDS = "the quick brown fox jumps over 13 lazy dogs; "
TEXT = (WORDS * 5)[:200] + INJECTION + WORDS * 3
PROVENANCE = Provenance(
    "a <model>", "uniprefill explain </code>", "2026-01-01", "cpu x1", {"python": "3.12", "jax": "0.11"}
)
TIMING = Timing(dense=[4.0, 9.0, 3.0], dropping=[2.0, 1.6, 8.0])


class AsciiTokenizer:
    """One token per printable character, so that a character's place is its token's."""

    has_chat_template = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) - FIRST for character in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token + FIRST) for token in ids)


@cache
def prefill(mode: str) -> tuple[up.UniPrefillConfig, up.PrefillResult]:
    config = up.UniPrefillConfig(
        top_p=0.6, block_size=16, sink_tokens=16, window_tokens=20, drop_layers=(1, 3), dropped_tokens=mode
    )  # pyright: ignore[reportArgumentType]
    assert LAST - FIRST < tiny("llama").config.vocab_size
    return config, tiny("llama").prefill([AsciiTokenizer().encode(TEXT)], config)[0]


def make_page(mode: str, marks: tuple[Mark, ...] = ()) -> Page:
    config, result = prefill(mode)
    return Page(explanation_page(explain_prefill(result, list(TEXT), config, marks), TIMING, PROVENANCE, marks))


def passages(page: Page) -> list[Element]:
    return [element for element in page.all("span", "document") if "passage" in element.classes]


@pytest.mark.parametrize("mode", ["discard", "carry"])
def test_every_character_is_as_dim_as_its_token_fared(mode: str):
    _, result = prefill(mode)
    survived = np.zeros(len(TEXT), int)
    for positions in result.kept_positions.values():
        survived[positions] += 1
    assert set(survived) == {0, 1, 2}, "the prompt must hold tokens of every fate"
    spans = passages(make_page(mode))
    assert "".join(span.text for span in spans) == TEXT
    shown = [depth for span in spans for depth in [depth_of(span)] * len(span.text)]
    assert shown == survived.tolist()


def depth_of(span: Element) -> int:
    (depth,) = (int(name[1:]) for name in span.classes if name[0] == "d")
    return depth


@pytest.mark.parametrize("mode", ["discard", "carry"])
def test_heat_map_shows_the_block_mass(mode: str):
    config, result = prefill(mode)
    page = make_page(mode)
    assert [drop["layer"] for drop in page.data["drops"]] == [1, 3]
    entering = {1: np.arange(len(TEXT)), 3: result.kept_positions[1] if mode == "discard" else np.arange(len(TEXT))}
    colours: dict[float, str] = {}
    for drop in page.data["drops"]:
        layer, mass = drop["layer"], result.block_mass[drop["layer"]]
        assert np.array_equal(np.asarray(drop["block_mass"], np.float32), mass) and mass.sum() == pytest.approx(1)
        rects = [
            rect
            for rect in page.all("rect", "heat-map")
            if any(parent.attributes.get("data-layer") == str(layer) for parent in rect.parents)
        ]
        fills: dict[int, str] = {}
        for rect in rects:
            start, width = int(rect.attributes["x"]), int(rect.attributes["width"])
            fills |= dict.fromkeys(range(start, start + width), rect.attributes["fill"])
        assert sorted(fills) == entering[layer].tolist()
        for rank, token in enumerate(entering[layer]):
            colours[float(mass[rank // config.block_size]) * len(mass)] = fills[int(token)]
    in_order = [brightness(colours[score]) for score in sorted(colours)]
    assert in_order == sorted(in_order) and len(set(in_order)) > 5, "brighter is more"


def brightness(colour: str) -> float:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return round(0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2, 3)


@pytest.mark.parametrize("mode", ["discard", "carry"])
def test_strips_and_table_show_the_tokens_of_every_segment(mode: str):
    _, result = prefill(mode)
    page = make_page(mode)
    lanes = [element for element in page.all("div", "heat-map") if element.classes == {"lane", "strip"}]
    everything = np.arange(len(TEXT))
    for lane, positions in zip(lanes, [everything, *result.kept_positions.values()], strict=True):
        rects = [rect for rect in page.all("rect") if lane in rect.parents]
        present = [
            token
            for rect in rects
            for token in range(int(rect.attributes["x"]), int(rect.attributes["x"]) + int(rect.attributes["width"]))
        ]
        assert present == positions.tolist()
    cells = [cell.text for cell in page.all("td", "segments")]
    assert cells[1::6] == [str(length) for length in result.segment_lengths]
    layers = {"discard": ["layers 0–1", "layers 2–3", "layer 4"], "carry": ["layers 0–1, 3", "layer 2", "layer 4"]}
    assert cells[::6] == layers[mode]


def test_savings_are_those_of_the_cost_model_and_the_clock():
    _, result = prefill("discard")
    text = " ".join(element.text for element in make_page("discard").all("div") if "card" in element.classes)
    assert f"{result.ideal_speedup:.2f}×" in text and f"{result.flop_fraction:.0%}" in text
    assert "2.00×" in text and "4 s dense, 2 s dropping" in text, "medians, not means"


def test_nothing_in_a_prompt_acts_on_the_page():
    page = make_page("discard")
    page.assert_needs_nothing_else()
    assert len(page.all("script")) == 2, "the data and the page's own"
    assert not page.all("img") and INJECTION in page.by_id("document").text
    assert "a <model>" in page.all("h1")[0].text and "</code>" in page.all("footer")[0].text


def test_marks_and_forced_parts():
    config, result = prefill("discard")
    mark = Mark(40, 45, "the <fact>")
    page = make_page("discard", (mark,))
    marked = [span for span in passages(page) if "marked" in span.classes]
    assert "".join(span.text for span in marked) == TEXT[40:45]
    assert "the <fact>" in page.by_id("heat-map").text
    forced = explain_prefill(result, list(TEXT), config).passages
    tokens = [passage.forced for passage in forced for _ in range(passage.start, passage.stop)]
    assert tokens == ["sink"] * 16 + [""] * (len(TEXT) - 36) + ["window"] * 20


def test_a_dense_prefill_has_a_page_without_a_heat_map():
    config = up.UniPrefillConfig.dense()
    result = tiny("llama").prefill([AsciiTokenizer().encode(TEXT[:40])], config)[0]
    page = Page(explanation_page(explain_prefill(result, list(TEXT[:40]), config), TIMING, PROVENANCE))
    page.assert_needs_nothing_else()
    assert not page.all("figure") and "nothing is ever dropped" in page.all("main")[0].text
    assert page.by_id("document").text == TEXT[:40]


def test_pieces_of_byte_tokens_join_to_the_text():
    from checkpoints_convert import open_checkpoint

    tokenizer = load_tokenizer(open_checkpoint("smollm2-135m"))
    assert tokenizer is not None
    text = "Größe, naïve 中文字 🙂👩‍👩‍👧 <|im_start|> \t\n  end\N{COMBINING ACUTE ACCENT} क्षि"
    ids = tokenizer.encode(text)
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    assert "" in pieces, "some characters must take several tokens"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    cut = token_pieces(tokenizer, tokenizer.encode("🙂")[:-1])
    assert "".join(cut) == tokenizer.decode(tokenizer.encode("🙂")[:-1]), "a character cut short is shown as one"
    assert token_pieces(tokenizer, []) == []


def test_command(tmp_path, monkeypatch, capsys):
    llm = tiny("llama")
    monkeypatch.setattr(llm, "tokenizer", AsciiTokenizer())
    monkeypatch.setattr(up.LLM, "load", lambda path, dtype: llm)
    html, png = tmp_path / "page.html", tmp_path / "map.png"
    words = f"explain tiny --runs 2 --top-p 0.6 --block-size 16 --drop-layers 1,3 --html {html} --png {png} --prompt"
    text = TEXT * 2
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), text])
    page = Page(html.read_text())
    page.assert_needs_nothing_else()
    config = up.UniPrefillConfig(top_p=0.6, block_size=16, drop_layers=(1, 3))
    result = llm.prefill([AsciiTokenizer().encode(text)], config)[0]
    kept = result.kept_positions[3]
    spans = passages(page)
    assert "".join(span.text for span in spans) == text
    assert "".join(span.text for span in spans if depth_of(span) == 2) == "".join(text[token] for token in kept)
    assert f"{len(kept):,} of {len(text):,}" in page.all("main")[0].text
    assert f"{result.ideal_speedup:.2f}x" in capsys.readouterr().err
    from matplotlib.image import imread

    picture = imread(png)
    assert picture.shape[0] > 300 and picture.shape[1] == 1650 and picture[..., :3].std() > 0.05


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--html page.html --demo --prompt x", "--demo brings its own prompt"),
        ("--html no/such/folder/page.html --prompt x", "--html is no/such/folder/page.html"),
        ("--html page.html --png no/such/folder/map.png --prompt x", "--png is no/such/folder/map.png"),
        ("--html page.html --prompt x --prompt-file y", "both --prompt and --prompt-file"),
        ("--prompt x", "'--html'"),
        ("--html page.html --prompt x --top-p 0", "top_p is 0.0"),
        ("--html page.html --prompt x --runs 0", "'--runs'"),
    ],
)
def test_wrong_options(words: str, message: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "smollm2-135m", *words.split()])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_data_of_the_page_is_what_the_text_shows():
    page = make_page("discard")
    described = page.data["passages"]
    assert [entry["stop"] - entry["start"] for entry in described] == [len(span.text) for span in passages(page)]
    assert all(sum(entry["kept"]) == depth_of(span) for entry, span in zip(described, passages(page), strict=True))
    assert "text" not in described[0] and INJECTION not in json.dumps(described)
