"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const elements = new Map();
  for (const element of document.querySelectorAll("[data-passage]")) {
    const number = Number(element.dataset.passage);
    if (!elements.has(number)) elements.set(number, []);
    elements.get(number).push(element);
  }
  let current = null;

  const add = (parent, name, text) => {
    const element = document.createElement(name);
    element.textContent = text;
    parent.append(element);
    return element;
  };
  const count = (value) => value.toLocaleString("en");

  const describe = (passage) => {
    tip.replaceChildren();
    add(tip, "p", `Tokens ${count(passage.start)} to ${count(passage.stop - 1)}${passage.mark ? `: ${passage.mark}` : ""}`);
    if (passage.forced) {
      add(tip, "p", passage.forced === "sink" ? "Always stays: the prompt's beginning" : "Always stays: the prompt's end");
    }
    if (!data.drops.length) return;
    const table = add(tip, "table", "");
    const head = add(table, "tr", "");
    for (const name of ["layer", "score", "of an even share", ""]) add(head, "th", name);
    data.drops.forEach((drop, number) => {
      const block = passage.blocks[number];
      if (block < 0) return;
      const row = add(table, "tr", "");
      const mass = drop.block_mass[block];
      add(row, "td", drop.layer);
      add(row, "td", `${(100 * mass).toPrecision(3)}%`);
      add(row, "td", `${(mass * drop.block_mass.length).toPrecision(3)}×`);
      add(row, "td", passage.kept[number] ? "stays" : "leaves");
    });
  };
  const place = (event) => {
    const gap = 16;
    const left = Math.min(event.clientX + gap, window.innerWidth - tip.offsetWidth - gap);
    const below = event.clientY + gap;
    const fits = below + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(left, gap)}px`;
    tip.style.top = `${fits ? below : Math.max(event.clientY - tip.offsetHeight - gap, 0)}px`;
  };
  const highlight = (number) => {
    if (number === current) return;
    for (const element of elements.get(current) ?? []) element.classList.remove("on");
    for (const element of elements.get(number) ?? []) element.classList.add("on");
    current = number;
    tip.style.display = number === null ? "none" : "block";
    if (number !== null) describe(data.passages[number]);
  };
  const passageAt = (event) => {
    const element = event.target.closest("[data-passage]");
    return element === null ? null : Number(element.dataset.passage);
  };

  document.addEventListener("mousemove", (event) => {
    const number = passageAt(event);
    highlight(number);
    if (number !== null) place(event);
  });
  document.addEventListener("mouseleave", () => highlight(null));
  document.addEventListener("scroll", () => highlight(null));
  document.getElementById("heat-map")?.addEventListener("click", (event) => {
    const number = passageAt(event);
    if (number === null) return;
    const text = elements.get(number).find((element) => element.closest("#document"));
    text.scrollIntoView({ block: "center", behavior: "smooth" });
  });
})();
