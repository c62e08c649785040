"use strict";
// The drawing: a tree of boxes (WAI-ARIA's tree pattern), laid out level by level with dagre.

const SVG = "http://www.w3.org/2000/svg";
/** A graph of no more ops than this is shown with its regions open, a larger one with them folded. */
const AT_START = 60;
/** The drawing isn't made smaller than this by itself, so that it can be read. */
const LEGIBLE = 0.6;
/** A4 and letter less their margins, in CSS pixels, with room for a heading. */
const SHEET = { width: 680, height: 860 };
/** To more boxes than this a pill has no lines; each gets an arrow that comes from nowhere. */
const MOST_LINES = 8;
/** Work of more milliseconds than this is interrupted, so that the page answers. */
const PATIENCE = 40;

/** Room around what is inside of an open box, as in page.css. */
const INSIDE = { marginLeft: 10, marginBottom: 10 };

/** Layouts by what was laid out: the copies of a block share one. */
const layouts = new Map();

function arranged(sizes, edges) {
  const key = JSON.stringify([sizes, edges]);
  if (!layouts.has(key)) {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 26, edgesep: 10 });
    sizes.forEach(([name, width, height]) => graph.setNode(String(name), { width, height }));
    edges.forEach(([from, to]) => graph.setEdge(String(from), String(to), {}));
    dagre.layout(graph);
    const { width, height } = graph.graph();
    layouts.set(key, {
      width, height,
      places: sizes.map(([name]) => graph.node(String(name))),
      lines: edges.map(([from, to]) => graph.edge(String(from), String(to)).points),
    });
  }
  return layouts.get(key);
}

/** Sizes of closed boxes by their words: measuring makes the browser lay out the whole page. */
const measured = new Map();

function sizeOf(element) {
  const { box } = element;
  const words = (element.firstElementChild || element).textContent;
  const key = `${box ? box.kind : "pill"} ${words}`;
  if (!measured.has(key)) {
    const head = element.firstElementChild || element;
    const edge = element.offsetWidth - element.clientWidth;
    measured.set(key, box ? [head.offsetWidth + edge, head.offsetHeight + 3]
      : [element.offsetWidth, element.offsetHeight]);
  }
  const [width, height] = measured.get(key);
  if (!box || !box.open) return [width, height];
  const { marginLeft, marginBottom } = INSIDE;
  return [Math.max(width, box.layout.width + 2 * marginLeft + 3),
    height + box.layout.height + marginBottom];
}

/** A smooth path through dagre's points. */
function pathThrough(points) {
  const at = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  const middle = (a, b) => ({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 });
  let path = `M${at(points[0])}`;
  for (let i = 1; i < points.length - 1; i++) {
    const end = i === points.length - 2 ? points[i + 1] : middle(points[i], points[i + 1]);
    path += `Q${at(points[i])} ${at(end)}`;
  }
  return points.length === 2 ? `${path}L${at(points[1])}` : path;
}

class Diagram {
  constructor(graph, onShow) {
    this.graph = graph;
    this.onShow = onShow; // called with the box to tell of
    this.scale = 1;
    this.tree = make("div", { class: "tree", role: "tree", "aria-label": `Drawing of ${graph.name}`,
      keydown: (event) => this.onKey(event), focusin: (event) => this.onFocus(event),
      click: (event) => this.onClick(event), mousemove: (event) => this.onHover(event),
      mouseleave: () => this.tell(this.current) });
    this.viewport = make("div", { class: "viewport" }, make("div", { class: "sizer" }, this.tree));
    graph.root.element = graph.root.inside = this.tree;
  }

  /** To be called once the viewport is in the document: boxes are measured there. */
  start() {
    const { root } = this.graph;
    const openAll = (box) => {
      box.open = box.kind !== "repeat" && box.children.length > 0;
      box.children.forEach(openAll);
    };
    if (this.graph.nodes.length <= AT_START) openAll(root);
    else if (root.children.length === 1) root.children[0].open = true;
    this.arrange(root, true);
    this.fit(this.viewport.clientWidth, LEGIBLE);
    this.select([...root.visible()][0]);
    this.tell(this.current);
  }

  // --- drawing ----------------------------------------------------------------------------------

  /** Lay out the inside of an open box; with `deep`, of the open boxes in it first. */
  arrange(box, deep = false) {
    for (const child of box.children) {
      if (!child.element) box.inside.append(this.build(child));
      if (deep && child.open) this.arrange(child, true);
    }
    const all = box.edges();
    const ends = ["in", "out"].map((end) => [end, all.filter((e) => e.from === end || e.to === end)]);
    const pills = ends.filter(([, own]) => own.length && own.length <= MOST_LINES)
      .map(([end]) => end);
    const loose = ends.flatMap(([end, own]) => (pills.includes(end) ? [] : own));
    const edges = all.filter((edge) => !loose.includes(edge));
    box.pills ||= new Map();
    for (const end of pills) {
      if (!box.pills.has(end)) box.pills.set(end, this.pill(box, end, edges));
    }
    box.inside.append(...box.pills.values());
    const elements = [...box.children.map((child, i) => [i, child.element]), ...box.pills];
    const sizes = elements.map(([name, e]) => [name, ...sizeOf(e)]);
    const layout = arranged(sizes, edges.map(({ from, to }) => [from, to]));
    elements.forEach(([, element], i) => {
      const { x, y, width, height } = layout.places[i];
      element.style.left = `${x - width / 2}px`;
      element.style.top = `${y - height / 2}px`;
    });
    box.inside.style.width = `${layout.width}px`;
    box.inside.style.height = `${layout.height}px`;
    box.layout = layout;
    this.drawEdges(box, edges, layout, loose);
    if (box === this.graph.root) this.resize();
  }

  drawEdges(box, edges, layout, loose) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "edges");
    svg.setAttribute("width", layout.width);
    svg.setAttribute("height", layout.height);
    svg.setAttribute("aria-hidden", "true");
    const line = (points, edge) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("d", pathThrough(points));
      path.setAttribute("marker-end", "url(#arrow)");
      svg.append(path);
      return { path, ends: [box.children[edge.from], box.children[edge.to]] };
    };
    box.lines = edges.map((edge, i) => line(layout.lines[i], edge));
    for (const edge of loose) {
      const comes = edge.from === "in";
      const { x, y, height } = layout.places[comes ? edge.to : edge.from];
      const aside = comes ? 9 : -9; // beside the lines from and to other boxes
      const top = comes ? y - height / 2 - 11 : y + height / 2;
      const points = [{ x: x - aside, y: top }, { x: x - aside, y: top + 11 }];
      box.lines.push(line(points, edge));
      box.lines.at(-1).path.classList.add("loose");
    }
    if (box.svg) box.svg.replaceWith(svg);
    else box.inside.prepend(svg);
    box.svg = svg;
  }

  /** From a box outwards, after its size has changed. */
  arrangeAround(box) {
    for (let outer = box; outer; outer = outer.parent) if (outer.open) this.arrange(outer);
  }

  build(box) {
    const backends = box.runsOn;
    const style = backends.length === 1 ? DATA.styles[backends[0]] || "" : "mixed";
    const siblings = box.parent.children;
    const head = make("div", { class: "head" },
      make("span", { class: "swatches", "aria-hidden": "true" }, ...backends.map(swatch)),
      make("span", { class: "title" }, box.title),
      box.kind === "op" || box.kind === "board" ? ""
        : make("span", { class: "backend" }, backends.join(" + ")),
      ...(box.region ? box.region.marks : []).map((mark) =>
        make("span", { class: `mark ${mark}` }, mark)),
      make("span", { class: "subtitle" }, box.subtitle),
      box.kind === "op" && box.node.fusion
        ? make("span", { class: "fusion" }, `fused: ${box.node.fusion}`) : "");
    box.element = make("div", { class: `box ${box.kind} ${style}`, role: "treeitem", tabindex: "-1",
      "aria-label": box.spoken, "aria-level": box.level, "aria-setsize": siblings.length,
      "aria-posinset": siblings.indexOf(box) + 1, "aria-selected": "false" }, head);
    box.element.box = box;
    if (box.children.length) {
      box.inside = make("div", { class: "inside", role: "group" });
      box.element.append(box.inside);
      this.markOpen(box);
    }
    return box.element;
  }

  /** Where values come from outside of a box, or leave it. */
  pill(box, end, edges) {
    const values = new Set(edges.filter((e) => e.from === end || e.to === end)
      .flatMap((e) => [...e.values]));
    const labels = [...values].map((value) => this.graph.label(value));
    const text = labels.length <= 2 ? `${end}: ${labels.join(", ")}` : `${labels.length} ${end}`;
    return make("div", { class: `pill ${end}`, "aria-hidden": "true",
      title: labels.slice(0, 20).join(", ") }, text);
  }

  markOpen(box) {
    box.element.classList.toggle("open", box.open);
    box.element.setAttribute("aria-expanded", String(box.open));
  }

  // --- opening and closing ----------------------------------------------------------------------

  toggle(box, open = !box.open) {
    if (!box.children.length || box.open === open) return;
    box.open = open;
    this.markOpen(box);
    if (open && box.kind === "repeat") { // one block of a repeat shows what the others hold
      const [first] = box.children;
      if (first.children.length && first.children.length <= AT_START && !first.open) {
        first.open = true;
        if (first.element) this.markOpen(first);
      }
    }
    if (open) this.arrange(box, true);
    this.arrangeAround(box.parent);
    if (!open && [...this.current.ancestors()].includes(box)) this.select(box);
    this.highlight();
  }

  /** Open or close all; in steps, so that the page goes on answering. */
  async toggleAll(open) {
    const all = (box) => [box, ...box.children.flatMap(all)];
    const boxes = all(this.graph.root).filter((box) => box.parent && box.children.length);
    this.tree.setAttribute("aria-busy", "true");
    if (open) {
      for (const box of boxes) box.open = true;
      this.rested = performance.now();
      await this.arrangeSlowly(this.graph.root);
    } else {
      for (const box of boxes) {
        box.open = false;
        if (box.element) this.markOpen(box);
      }
      this.arrange(this.graph.root);
      const outermost = [this.current, ...this.current.ancestors()].at(-2);
      this.select(outermost);
    }
    this.tree.removeAttribute("aria-busy");
    this.highlight();
  }

  async arrangeSlowly(box) {
    for (const child of box.children) {
      if (!child.element) box.inside.append(this.build(child));
      else if (child.children.length) this.markOpen(child);
    }
    for (const child of box.children) if (child.open) await this.arrangeSlowly(child);
    this.arrange(box);
    if (performance.now() - this.rested > PATIENCE) {
      await new Promise((done) => setTimeout(done));
      this.rested = performance.now();
    }
  }

  /** Bring a node into sight and focus it. */
  reveal(number) {
    const leaf = this.graph.leaf[number];
    const shut = [...leaf.ancestors()].filter((box) => !box.open);
    for (const box of shut.reverse()) {
      box.open = true;
      if (box.element) this.markOpen(box);
    }
    if (shut.length) {
      this.arrange(shut[0], true);
      this.arrangeAround(shut[0].parent);
    }
    this.focus(leaf);
  }

  // --- zooming ----------------------------------------------------------------------------------

  zoom(scale) {
    this.scale = Math.min(2, Math.max(0.2, scale));
    this.resize();
  }

  /** As large as fits the width, but not larger than life. */
  fit(width = this.viewport.clientWidth, least = 0) {
    this.zoom(Math.max(least, Math.min(1, (width - 8) / this.tree.offsetWidth)));
  }

  /** For paper: as it is seen, but what doesn't fit legibly is closed, the innermost first. */
  fitSheet() {
    const open = [...this.graph.root.visible()].filter((box) => box.open);
    this.before = { scale: this.scale, open: [...open] };
    const scale = () => Math.min(1, SHEET.width / this.tree.offsetWidth,
      SHEET.height / this.tree.offsetHeight);
    while (scale() < LEGIBLE && open.length) {
      const innermost = Math.max(...open.map((box) => box.level));
      for (const box of open.filter((other) => other.level === innermost)) {
        box.open = false;
        this.markOpen(box);
        open.splice(open.indexOf(box), 1);
      }
      this.arrange(this.graph.root, true);
    }
    this.zoom(scale());
  }

  /** As it was before {@link fitSheet}. */
  restore() {
    for (const box of this.before.open) {
      box.open = true;
      this.markOpen(box);
    }
    this.arrange(this.graph.root, true);
    this.zoom(this.before.scale);
    this.highlight();
  }

  resize() {
    const { style } = this.tree.parentElement;
    this.tree.style.transform = this.scale === 1 ? "" : `scale(${this.scale})`;
    style.width = `${this.tree.offsetWidth * this.scale}px`;
    style.height = `${this.tree.offsetHeight * this.scale}px`;
  }

  // --- where one is -----------------------------------------------------------------------------

  select(box) {
    if (this.current && this.current.element) {
      this.current.element.setAttribute("tabindex", "-1");
      this.current.element.setAttribute("aria-selected", "false");
    }
    this.current = box;
    box.element.setAttribute("tabindex", "0");
    box.element.setAttribute("aria-selected", "true");
    this.highlight();
  }

  focus(box) {
    this.select(box);
    box.element.focus({ preventScroll: true });
    box.element.firstElementChild.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** Let the edges of a box stand out. */
  highlight(box = this.current) {
    for (const line of this.lit || []) line.classList.remove("lit");
    const lines = box && box.parent && box.parent.lines ? box.parent.lines : [];
    this.lit = lines.filter(({ ends }) => ends.includes(box)).map(({ path }) => path);
    for (const line of this.lit) line.classList.add("lit");
  }

  boxAt(event) {
    const element = event.target.closest(".box");
    return element ? element.box : null;
  }

  onFocus(event) {
    const box = this.boxAt(event);
    if (!box) return;
    if (box !== this.current) this.select(box);
    this.tell(box);
  }

  /** A move of the mouse, not mouseover: scrolling by keys slides boxes under a mouse at rest. */
  onHover(event) {
    const box = this.boxAt(event) || this.current;
    if (box !== this.told) this.tell(box);
  }

  tell(box) {
    this.told = box;
    this.onShow(box);
    this.highlight(box);
  }

  onClick(event) {
    const box = this.boxAt(event);
    if (!box) return;
    this.focus(box);
    if (event.target.closest(".head")) this.toggle(box);
  }

  onKey(event) {
    const box = this.current;
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const inSight = () => [...this.graph.root.visible()];
    const step = (by) => inSight()[inSight().indexOf(box) + by];
    const moves = {
      ArrowDown: () => step(1),
      ArrowUp: () => step(-1),
      Home: () => inSight()[0],
      End: () => inSight().at(-1),
      ArrowRight: () => (box.open ? box.children[0] : (this.toggle(box, true), box)),
      ArrowLeft: () => {
        if (box.open) { this.toggle(box, false); return box; }
        return box.parent === this.graph.root ? box : box.parent;
      },
      Enter: () => { this.toggle(box); return box; },
      " ": () => { this.toggle(box); return box; },
    };
    const letter = event.key.length === 1 && /\S/.test(event.key) && event.key !== "/";
    let target = null;
    if (moves[event.key]) target = moves[event.key]();
    else if (letter) target = this.next(inSight(), box, event.key.toLowerCase());
    else return;
    event.preventDefault();
    if (target) this.focus(target);
  }

  /** The next box in sight whose title begins with a letter. */
  next(inSight, box, letter) {
    const from = inSight.indexOf(box) + 1;
    return [...inSight.slice(from), ...inSight.slice(0, from)]
      .find((other) => other.title.toLowerCase().startsWith(letter));
  }
}
