"use strict";
// Draws the flame graph: rows from the top, widths by samples; zoom, search, keys.

const ROW_REM = matchMedia("(pointer: coarse)").matches ? 1.8 : 1.5;
/** Calls narrower than this share of the drawing are left out until it is zoomed. */
const THINNEST = 0.0012;
/** Below this many pixels there is no room for letters. */
const LETTERS_PX = 26;

/** The tree out of its flat form: nodes in order, parents first. */
function grow({ labels, nodes }) {
  const path = [];
  let root = null;
  for (const [depth, label, samples] of nodes) {
    const [name, style] = labels[label];
    const node = { name, style, samples, depth, parent: path[depth - 1] ?? null, children: [],
      hit: false, element: null, left: 0, width: 0 };
    if (node.parent) node.parent.children.push(node);
    else root = node;
    path[depth] = node;
  }
  return root;
}

/** Parents first; without recursion, as stacks are deep. */
function* walk(top) {
  const waiting = [top];
  while (waiting.length) {
    const node = waiting.pop();
    yield node;
    waiting.push(...node.children);
  }
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const percent = (part, whole) => `${(100 * part / whole).toFixed(1)}%`;

class FlameGraph {
  constructor(root, holder) {
    this.root = root;
    this.top = root;
    this.current = root;
    this.hits = 0;
    this.flames = element("div", {
      class: "flames", tabindex: "0", role: "tree", "aria-label": "Flame graph",
      keydown: (event) => this.key(event),
      focus: () => this.select(this.current),
    });
    this.told = element("p", { class: "told", "aria-live": "polite" });
    this.status = element("output", { class: "muted" });
    this.field = element("input", {
      type: "search", placeholder: "Find a function or region",
      "aria-label": "Find in the flame graph",
      input: () => this.search(),
      keydown: (event) => {
        if (event.key === "Escape" && !this.field.value) this.flames.focus();
      },
    });
    this.back = element("button", { type: "button", click: () => this.zoom(this.root) },
      "Whole graph");
    holder.append(
      element("div", { class: "tools" },
        element("div", { class: "finder", role: "search" }, this.field, this.status),
        element("div", { class: "buttons" }, this.back)),
      this.flames, this.told);
    holder.hidden = false;
    this.zoom(root);
    new ResizeObserver(() => this.letters()).observe(this.flames);
  }

  /** Make ``node`` as wide as the drawing; those above it keep the full width. */
  zoom(node) {
    this.top = node;
    for (const each of walk(this.root)) each.element = null;
    const shown = [];
    for (let above = node.parent; above; above = above.parent) shown.push(this.place(above, 0, 1));
    node.left = 0;
    node.width = 1;
    let deepest = node.depth;
    for (const each of walk(node)) {
      if (each.width < THINNEST) continue;
      shown.push(this.place(each, each.left, each.width));
      deepest = Math.max(deepest, each.depth);
      let left = each.left;
      for (const child of each.children) {
        child.left = left;
        child.width = each.width * child.samples / each.samples;
        left += child.width;
      }
      for (const child of each.children) if (child.width < THINNEST) child.width = 0;
    }
    this.flames.replaceChildren(...shown);
    this.flames.style.height = `${(deepest + 1) * ROW_REM + 0.2}rem`;
    this.back.disabled = node === this.root;
    this.letters();
    this.select(this.current.element ? this.current : node);
  }

  place(node, left, width) {
    const made = element("div", {
      class: `call ${node.style}`, role: "treeitem", id: `call${this.number(node)}`,
      "aria-level": String(node.depth + 1), "aria-label": this.describe(node), title: node.name,
      click: () => (this.current === node && node !== this.top ? this.zoom(node) : this.select(node)),
      dblclick: () => this.zoom(node),
    });
    made.classList.toggle("above", node.depth < this.top.depth);
    made.classList.toggle("hit", node.hit);
    made.style.left = `${100 * left}%`;
    made.style.width = `${100 * width}%`;
    made.style.top = `${node.depth * ROW_REM}rem`;
    node.left = left;
    node.width = width;
    node.element = made;
    return made;
  }

  number(node) {
    node.number ??= FlameGraph.count++;
    return node.number;
  }

  /** Names where there is room for them. */
  letters() {
    const whole = this.flames.clientWidth;
    for (const each of walk(this.root)) {
      if (!each.element) continue;
      const room = each.width * whole >= LETTERS_PX;
      each.element.textContent = room ? each.name : "";
      each.element.classList.toggle("thin", !room);
    }
  }

  describe(node) {
    const own = node.samples - node.children.reduce((sum, child) => sum + child.samples, 0);
    return `${node.name}: ${percent(node.samples, this.root.samples)} of all, ` +
      `${node.samples} samples, ${own} in itself`;
  }

  select(node) {
    this.current.element?.classList.remove("current");
    this.current.element?.setAttribute("aria-selected", "false");
    this.current = node;
    node.element.classList.add("current");
    node.element.setAttribute("aria-selected", "true");
    this.flames.setAttribute("aria-activedescendant", node.element.id);
    this.told.textContent = this.describe(node);
  }

  /** Keep the current call in sight, but only when it was reached by keys. */
  go(node) {
    if (!node) return;
    if (!node.element) this.zoom(node.parent);
    if (!node.element) this.zoom(node);
    this.select(node);
    node.element.scrollIntoView({ block: "nearest" });
  }

  beside(by) {
    const row = (this.current.parent?.children ?? []).filter((each) => each.element);
    return row[row.indexOf(this.current) + by];
  }

  widest(node) {
    return node.children.reduce((a, b) => (a && a.samples >= b.samples ? a : b), null);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowDown: () => this.go(this.widest(this.current)),
      ArrowUp: () => this.go(this.current.parent),
      ArrowLeft: () => this.go(this.beside(-1)),
      ArrowRight: () => this.go(this.beside(1)),
      Home: () => this.go(this.root),
      Enter: () => this.zoom(this.current),
      " ": () => this.zoom(this.current),
      Escape: () => this.zoom(this.top.parent ?? this.root),
      "/": () => this.field.focus(),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  /** Mark the calls whose names have all the words, and say how many samples are in them. */
  search() {
    const words = this.field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let samples = 0;
    for (const each of walk(this.root)) {
      const name = each.name.toLowerCase();
      each.hit = words.length > 0 && words.every((word) => name.includes(word));
      each.within = each.hit || Boolean(each.parent?.within);
      if (each.hit && !each.parent?.within) samples += each.samples;
      each.element?.classList.toggle("hit", each.hit);
    }
    this.status.textContent = words.length ? `in ${percent(samples, this.root.samples)}` : "";
  }
}
FlameGraph.count = 0;

const root = grow(JSON.parse(document.getElementById("data").textContent));
if (root.samples) new FlameGraph(root, document.querySelector("#flame .drawing"));
