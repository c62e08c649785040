"use strict";
// Puts the drawings into the page: toolbar, drawing, panel; printing.

/** Numbers of the nodes that have all words of a search. */
function search(graph, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return [];
  return graph.nodes.flatMap((node, i) => {
    const text = [node.name, node.op, node.backend, node.reason, node.source, node.module,
      node.fusion, node.value, ...node.declined.flat()].join(" ").toLowerCase();
    return wanted.every((word) => text.includes(word)) ? [i] : [];
  });
}

function finder(diagram) {
  const { graph } = diagram;
  const status = make("output", { class: "muted" });
  let hits = [];
  let at = -1;
  const move = (by) => {
    if (!hits.length) return;
    at = (at + by + hits.length) % hits.length;
    diagram.reveal(hits[at]);
    status.textContent = `${at + 1} of ${hits.length}`;
  };
  const field = make("input", {
    type: "search", placeholder: "Find an op, reason, line", "aria-label": `Find in ${graph.name}`,
    input: () => {
      hits = search(graph, field.value);
      at = -1;
      status.textContent = field.value.trim() ? `${hits.length} found` : "";
    },
    keydown: (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        move(event.shiftKey ? -1 : 1);
        if (hits.length) field.focus({ preventScroll: true });
      } else if (event.key === "Escape" && !field.value) {
        diagram.focus(diagram.current);
      }
    },
  });
  const button = (label, sign, by) =>
    make("button", { type: "button", "aria-label": label, title: label, click: () => move(by) },
      sign);
  const attributes = { class: "finder", role: "search", "aria-label": `Search of ${graph.name}` };
  return { field, element: make("div", attributes, field,
    button("Previous match", "↑", -1), button("Next match", "↓", 1), status) };
}

function toolbar(diagram, find) {
  const button = (label, sign, click) =>
    make("button", { type: "button", "aria-label": label, title: label, click }, sign);
  return make("div", { class: "tools" }, find.element,
    make("div", { class: "buttons" },
      button("Unfold all", "Unfold all", () => diagram.toggleAll(true)),
      button("Fold all", "Fold all", () => diagram.toggleAll(false)),
      button("Zoom out", "−", () => diagram.zoom(diagram.scale / 1.25)),
      button("Zoom in", "+", () => diagram.zoom(diagram.scale * 1.25)),
      button("Fit the width", "Fit", () => diagram.fit())));
}

const diagrams = [];
const places = document.querySelectorAll(".drawing"); // one for each graph that is drawn, in order
DATA.graphs.forEach((raw, number) => {
  const graph = new GraphModel(raw);
  const place = places[number];
  const panel = make("div", { class: "panel", role: "region", tabindex: "0",
    "aria-label": `Details in ${graph.name}` });
  const diagram = new Diagram(graph, (box) =>
    fillDetails(panel, box, (number) => diagram.reveal(number)));
  const find = finder(diagram);
  place.append(toolbar(diagram, find),
    make("div", { class: "board-and-panel" }, diagram.viewport, panel),
    make("p", { class: "muted help" },
      "Arrow keys move through the drawing; → opens and ← closes a box; / searches."));
  place.hidden = false;
  place.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target !== find.field) {
      event.preventDefault();
      find.field.focus();
    }
  });
  diagram.start();
  diagrams.push(diagram);
});

// A drawing is printed on one sheet: browsers cut what is placed freely badly.
addEventListener("beforeprint", () => {
  for (const diagram of diagrams) diagram.fitSheet();
});
addEventListener("afterprint", () => {
  for (const diagram of diagrams) diagram.restore();
});
