"use strict";
// The model: graphs as trees of boxes, from the JSON that explanations/page.py wrote.

const DATA = JSON.parse(document.getElementById("data").textContent);

/** A graph's nodes, inputs, regions and boxes, with names instead of numbers. */
class GraphModel {
  constructor(raw) {
    const text = (number) => DATA.strings[number];
    this.name = raw.name;
    this.inputs = raw.inputs.map(([name, value, fixed]) => ({ name, value, fixed }));
    this.outputs = raw.outputs;
    this.regions = raw.regions;
    this.nodes = raw.nodes.map(
      ([name, op, short, value, backend, region, reason, source, module, declined, inputs]) => ({
        name, op: text(op), short: text(short), value: text(value), backend: text(backend),
        region: raw.regions[region], reason: text(reason), source: text(source),
        code: DATA.code[source] || "", module: text(module), inputs, users: [], fusion: "",
        declined: raw.declines[declined].map(([who, why]) => [text(who), text(why)]),
      }));
    this.nodes.forEach((node, i) => {
      for (const used of node.inputs) if (used >= 0) this.nodes[used].users.push(i);
    });
    for (const region of raw.regions) {
      for (const [name, nodes] of region.fusions) {
        for (const i of nodes) if (this.nodes[i]) this.nodes[i].fusion = name;
      }
    }
    this.returned = new Set(raw.outputs);
    this.leaf = new Array(raw.nodes.length);
    this.root = new Box(this, null, { kind: "graph", boxes: raw.boxes });
    this.root.open = true;
  }

  /** What a number of node.inputs stands for, in words. */
  label(number) {
    return number < 0 ? this.inputs[-1 - number].name : this.nodes[number].name;
  }
}

/** A box: an op, or something that opens into further boxes. */
class Box {
  constructor(graph, parent, raw) {
    this.graph = graph;
    this.parent = parent;
    this.open = false;
    this.element = null;
    if (typeof raw === "number") {
      this.kind = "op";
      this.node = graph.nodes[raw];
      this.nodes = [raw];
      this.children = [];
      graph.leaf[raw] = this;
      return;
    }
    this.kind = raw.kind;
    this.region = raw.region === undefined ? null : graph.regions[raw.region];
    this.copies = raw.copies || 0;
    this.children = raw.boxes.map((child) => new Box(graph, this, child));
    this.nodes = this.children.flatMap((child) => child.nodes).sort((a, b) => a - b);
    this.backends = [...new Set(this.nodes.map((i) => graph.nodes[i].backend))];
  }

  get level() {
    return this.parent ? this.parent.level + 1 : 0;
  }

  /** The backends that run what is inside. */
  get runsOn() {
    return this.kind === "op" ? [this.node.backend] : this.backends;
  }

  /** The user's module that all of it is in. */
  get module() {
    const paths = this.nodes.map((i) => this.graph.nodes[i].module).filter(Boolean);
    if (!paths.length) return "";
    const split = paths.map((path) => path.split("."));
    let length = 0;
    while (length < split[0].length && split.every((p) => p[length] === split[0][length])) length++;
    return split[0].slice(0, length).join(".");
  }

  get title() {
    const siblings = this.parent ? this.parent.children : [];
    switch (this.kind) {
      case "op": return this.node.short;
      case "region": return this.region.name;
      case "board": return "the board itself";
      case "repeat": return `block ×${this.copies}`;
      case "copy": return `copy ${this.number}`;
      default: return `part ${siblings.indexOf(this) + 1} of ${siblings.length}`;
    }
  }

  /** A copy's place among the copies, parts between them not counted. */
  get number() {
    let repeat = this.parent;
    while (repeat.kind === "part") repeat = repeat.parent;
    const flat = (box) => (box.kind === "part" ? box.children.flatMap(flat) : [box]);
    return repeat.children.flatMap(flat).indexOf(this) + 1;
  }

  /** The small print below the title. */
  get subtitle() {
    const ops = (n) => (n === 1 ? "1 op" : `${n} ops`);
    if (this.kind === "op") return this.node.value;
    const parts = [ops(this.nodes.length)];
    if (this.kind === "repeat") {
      parts[0] = `${ops(this.nodes.length / this.copies)} each`;
      const [first, last] = [this.children[0].module, this.children.at(-1).module];
      if (first && last && first !== last) parts.push(`modules ${first} to ${last}`);
    } else if (this.kind === "region") {
      parts.push(this.region.sameAs ? `code of ${this.region.sameAs}` : this.region.seconds);
    } else if (this.module) {
      parts.push(`module ${this.module}`);
    }
    return parts.join(" · ");
  }

  /** What a screen reader says. */
  get spoken() {
    const parts = [this.title.replace("×", "times ")];
    if (this.kind === "op" && this.node.fusion) parts.push(`fused: ${this.node.fusion}`);
    if (this.kind !== "board") parts.push(`on ${this.runsOn.join(" and ")}`);
    parts.push(this.subtitle.replaceAll(" · ", ", "), ...(this.region ? this.region.marks : []));
    return parts.filter(Boolean).join(", ");
  }

  *ancestors() {
    for (let box = this.parent; box; box = box.parent) yield box;
  }

  /** Boxes in sight, in order, this one's children first. */
  *visible() {
    if (!this.open) return;
    for (const child of this.children) {
      yield child;
      yield* child.visible();
    }
  }

  /**
   * Edges between this box's children, and from and to the outside.
   * A value from outside or for the outside is drawn to the pills "in" and "out". Weights aren't.
   * The board's nodes that a region reads it has copies of; an edge that would make a circle isn't
   * drawn.
   */
  edges() {
    const home = new Map();
    this.children.forEach((child, i) => child.nodes.forEach((node) => home.set(node, i)));
    const found = new Map();
    const add = (from, to, value) => {
      if (from === to) return;
      const key = `${from} ${to}`;
      if (!found.has(key)) found.set(key, { from, to, values: new Set() });
      found.get(key).values.add(value);
    };
    const { nodes, inputs } = this.graph;
    for (const i of this.nodes) {
      const to = home.get(i);
      for (const used of nodes[i].inputs) {
        if (used < 0) {
          if (!inputs[-1 - used].fixed) add("in", to, used);
        } else if (!home.has(used)) {
          add("in", to, used);
        } else if (nodes[used].backend !== "board" || home.get(used) < to) {
          add(home.get(used), to, used);
        }
      }
      if (this.graph.returned.has(i) || nodes[i].users.some((user) => !home.has(user))) {
        add(to, "out", i);
      }
    }
    return [...found.values()];
  }
}
