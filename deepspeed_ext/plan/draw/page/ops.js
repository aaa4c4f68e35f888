"use strict";
// Draws the timelines in #data: a canvas for each, all with one time axis.
// Only what is in view is drawn, and of ops thinner than a pixel one for each pixel, so that long timelines stay fast.

const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 84, RIGHT = 14, GAP = 3, AXIS = 24, MEMORY = 120, MEMORY_GAP = 14, LANE = 6;
const COPY_COLOURS = ["rgb(188 76 0 / 0.75)", "rgb(27 124 131 / 0.75)"];
const longest = Math.max(...data.panels.map((panel) => panel.makespan)) || 1;
const view = { from: 0, to: longest };
const state = { panel: null, rank: -1, op: -1, time: null };
const colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "line", "track", "accent", "link", "card"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
}

function element(tag, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

// Textures: hatching of backwards and input gradients, dots of weight gradients.

function texture(draw, size) {
  const tile = element("canvas", { width: size, height: size });
  draw(tile.getContext("2d"));
  return tile;
}
const hatching = (from, to) => texture((pen) => {
  pen.strokeStyle = "rgb(31 35 40 / 0.3)";
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) { pen.moveTo(shift, from); pen.lineTo(shift + 6, to); }
  pen.stroke();
}, 6);
const dots = texture((pen) => {
  pen.fillStyle = "rgb(31 35 40 / 0.42)";
  for (const at of [1.25, 3.75]) { pen.beginPath(); pen.arc(at, at, 0.8, 0, 7); pen.fill(); }
}, 5);
const KINDS = [
  { name: "forward", letter: "F", tile: null, height: 1 },
  { name: "backward", letter: "B", tile: hatching(6, 0), height: 1 },
  { name: "input gradient", letter: "BI", tile: hatching(0, 6), height: 1 },
  { name: "weight gradient", letter: "BW", tile: dots, height: 0.62 },
];

const patterns = new Map();
function patternOf(tile, pen) {
  if (!patterns.has(tile)) patterns.set(tile, pen.createPattern(tile, "repeat"));
  return patterns.get(tile);
}

function fillOp(pen, kind, x, y, width, height, colour) {
  const { tile, height: share } = KINDS[kind];
  y += height * (1 - share);
  height *= share;
  pen.fillStyle = colour;
  pen.fillRect(x, y, width, height);
  if (tile && width >= 3) {
    pen.fillStyle = patternOf(tile, pen);
    pen.fillRect(x, y, width, height);
  }
}

// Times and names.

// Within a second a time is in milliseconds; on an axis all are as the largest one.
function shown(time, unit, largest = time) {
  if (unit === "s" && Math.abs(largest) < 1) return `${Number((time * 1000).toPrecision(5))} ms`;
  return `${Number(time.toPrecision(6))}${unit ? ` ${unit}` : ""}`;
}

function opName(panel, rank, index) {
  const ops = panel.ranks[rank];
  return `${ops.stage[index]}${KINDS[ops.kind[index]].letter}${ops.micro_batch[index]}.${ops.token_slice[index]}`;
}

function label(panel, ops, index) {
  const stage = panel.num_model_chunks > 1 ? ops.stage[index] : "";
  const tokenSlice = panel.num_token_slices > 1 ? `.${ops.token_slice[index]}` : "";
  return `${stage}${KINDS[ops.kind[index]].letter}${ops.micro_batch[index]}${tokenSlice}`;
}

// Ops are numbered over all ranks of a panel, in the order of their rows.

function place(panel, number) {
  let rank = 0;
  while (number >= panel.ranks[rank].first + panel.ranks[rank].start.length) rank++;
  return [rank, number - panel.ranks[rank].first];
}

function firstEndingAfter(ends, time) {
  let low = 0, high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] < time) low = middle + 1; else high = middle;
  }
  return low;
}

function valueAt(curve, time) {
  let low = 0, high = curve.time.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (curve.time[middle] <= time) low = middle + 1; else high = middle;
  }
  return low ? curve.value[low - 1] : 0;
}

function roundTimes(from, to, most) {
  const power = 10 ** Math.floor(Math.log10((to - from) / most));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => (to - from) / each <= most) || 1;
  const times = [];
  for (let index = Math.ceil(from / step); index * step <= to; index++) times.push(index * step);
  return times;
}
