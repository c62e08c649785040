"use strict";
// The panel beside a drawing: all that is known of the box that is pointed at or focused.

/** An element with attributes and children. Texts become text nodes, never HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

function swatch(backend) {
  return make("span", { class: `swatch ${DATA.styles[backend] || ""}`, "aria-hidden": "true" });
}

function backendTag(backend) {
  const name = backend === "board" ? "the board itself" : backend;
  return make("span", { class: `tag ${DATA.styles[backend] || ""}` }, swatch(backend), name);
}

/** Fills `panel` with what there is to say of `box`; `go` is called with a node to show. */
function fillDetails(panel, box, go) {
  const rows = box.kind === "op" ? opRows(box, go) : groupRows(box);
  panel.replaceChildren(
    make("h4", {}, box.kind === "op" ? box.node.op : box.title),
    make("dl", {}, ...rows.flatMap(([label, content, style]) => [
      make("dt", {}, label),
      make("dd", style ? { class: style } : {}, ...[content].flat()),
    ])));
}

function opRows(box, go) {
  const { node, graph } = box;
  const links = (numbers) => {
    const shown = numbers.slice(0, 12).map((i) => (i < 0
      ? graph.label(i) + (graph.inputs[-1 - i].fixed ? " (weight)" : "")
      : make("button", { type: "button", class: "link", click: () => go(i) }, graph.label(i))));
    if (numbers.length > 12) shown.push(`${numbers.length - 12} more`);
    return shown.flatMap((item, i) => (i ? [", ", item] : [item]));
  };
  const rows = [["runs on", [backendTag(node.backend)]], ["why", node.reason]];
  for (const [who, why] of node.declined) rows.push([`${who} declined`, why, "declined"]);
  if (node.fusion) rows.push(["fused", node.fusion]);
  if (node.source) {
    const code = node.code ? [make("pre", {}, make("code", {}, node.code))] : [];
    rows.push(["from", [make("code", {}, node.source), ...code]]);
  }
  if (node.module) rows.push(["module", make("code", {}, node.module)]);
  rows.push(["name", make("code", {}, node.name)]);
  if (node.value) rows.push(["value", make("code", {}, node.value)]);
  if (node.inputs.length) rows.push(["reads", links(node.inputs)]);
  if (node.users.length) rows.push(["read by", links(node.users)]);
  if (graph.returned.has(box.nodes[0])) rows.push(["returned", "it is an output of the graph"]);
  if (node.region) rows.push(["region", node.region.name]);
  return rows;
}

function groupRows(box) {
  if (box.kind === "region") {
    const rows = box.region.rows.map(([label, text]) =>
      [label, label === "backend" ? [backendTag(text)] : text,
        label === "tripped" || label === "note" ? label : ""]);
    return box.region.whole ? [["extent", "the whole graph"], ...rows] : rows;
  }
  const rows = [["runs on", box.runsOn.map(backendTag)], ["ops", opCounts(box)]];
  if (box.kind === "repeat") {
    const regions = new Set(box.nodes.map((i) => box.graph.nodes[i].region));
    const fresh = [...regions].filter((region) => region && !region.sameAs);
    rows.unshift(["repeats", regions.size > 1
      ? `${box.copies} times in a row; ${regions.size} regions, ${fresh.length} lowered here`
      : `${box.copies} times in a row: the same ops on the same shapes`]);
  }
  if (box.kind === "board") {
    for (const why of new Set(box.nodes.map((i) => box.graph.nodes[i].reason))) {
      rows.push(["why", why]);
    }
  }
  if (box.module) rows.push(["module", make("code", {}, box.module)]);
  const places = [...new Set(box.nodes.map((i) => box.graph.nodes[i].source).filter(Boolean))];
  for (const place of places.slice(0, 5)) rows.push(["from", make("code", {}, place)]);
  return rows;
}

function opCounts(box) {
  const counts = new Map();
  for (const i of box.nodes) {
    const { short } = box.graph.nodes[i];
    counts.set(short, (counts.get(short) || 0) + 1);
  }
  const sorted = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 8);
  return sorted.map(([op, n]) => (n > 1 ? `${op} ×${n}` : op)).join(", ");
}
