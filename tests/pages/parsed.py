"""A page as a reader's browser takes it apart, by the standard library's parser."""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "link", "img", "input", "hr", "wbr", "base", "embed", "source"}
# Attributes through which a page can fetch something, and what in a style or a script does.
FETCHING = {"src", "href", "xlink:href", "srcset", "data", "action", "formaction", "poster", "background", "ping"}
FETCHES = re.compile(r"url\((?!#)|@import|https?://|fetch\(|XMLHttpRequest|WebSocket|import\(|sendBeacon|\bsrc\b")


@dataclass(eq=False)  # each is itself alone; to compare what is around them takes minutes on a large page
class Element:
    """One element: its tag, attributes, the elements around it, and pieces of text in it and in all inside it."""

    tag: str
    attributes: dict[str, str]
    parents: tuple["Element", ...]
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text in it and in all inside it."""
        return "".join(self.pieces)

    def is_within(self, identifier: str) -> bool:
        """Whether an element with this id is around it."""
        return any(parent.attributes.get("id") == identifier for parent in self.parents)

    @property
    def classes(self) -> set[str]:
        """Its classes."""
        return set(self.attributes.get("class", "").split())


@dataclass
class Page(HTMLParser):
    """All elements in document order."""

    source: str
    elements: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Element] = []
        self.feed(self.source)
        self.close()
        assert not self._open, f"not closed: {[element.tag for element in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs}, tuple(self._open))
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1].tag == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.pieces.append(data)

    def all(self, tag: str, identifier: str = "") -> list[Element]:
        """Elements of a tag, of those within the element of an id if one is given."""
        return [
            element
            for element in self.elements
            if element.tag == tag and (not identifier or element.is_within(identifier))
        ]

    def by_id(self, identifier: str) -> Element:
        """The one element with this id."""
        (element,) = (element for element in self.elements if element.attributes.get("id") == identifier)
        return element

    @property
    def data(self) -> dict[str, Any]:
        """The object that the page's script reads."""
        return json.loads(self.by_id("data").text)

    def assert_needs_nothing_else(self) -> None:
        """Nothing in it refers to another file or to the network, and only its own script may run."""
        for element in self.elements:
            assert element.tag not in {"link", "iframe", "object", "embed", "base", "img", "form"}, element.tag
            for name, value in element.attributes.items():
                assert not name.startswith("on"), (element.tag, name)
                assert name not in FETCHING or value.startswith("#"), (element.tag, name, value)
                assert "://" not in value and "javascript:" not in value.lower(), (element.tag, name, value)
        scripts = [element for element in self.all("script") if element.attributes.get("type") != "application/json"]
        for element in [*scripts, *self.all("style")]:
            assert not FETCHES.search(element.text), FETCHES.search(element.text)
        policy = self.policy
        assert policy["default-src"] == "'none'"
        hashes = [base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode() for script in scripts]
        assert policy["script-src"].split() == ([f"'sha256-{value}'" for value in hashes] or ["'none'"])

    @property
    def policy(self) -> dict[str, str]:
        """The content security policy, by directive."""
        (meta,) = (
            element for element in self.all("meta") if element.attributes.get("http-equiv") == "Content-Security-Policy"
        )
        parts = (part.strip().partition(" ") for part in meta.attributes["content"].split(";"))
        return {name: value for name, _, value in parts}
