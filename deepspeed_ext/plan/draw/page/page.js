// The view that all panels share.

let due = false;
function redraw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; views.forEach((each) => each.draw()); });
}

function look(from, to) {
  const span = Math.min(Math.max(to - from, longest * 1e-7), longest * 1.02);
  from = Math.max(Math.min(from, longest * 1.02 - span), 0);
  Object.assign(view, { from, to: from + span });
  redraw();
}
function zoom(factor, around) { look(around - (around - view.from) * factor, around + (view.to - around) * factor); }
function pan(by) { look(view.from + by, view.to + by); }
function reset() { look(0, longest * 1.002); }
function middle() { return (view.from + view.to) / 2; }

function legend() {
  const panel = data.panels[0], entries = [], chips = (colourList, names) => colourList.map((colour, index) => {
    const chip = element("span", { className: "chip", textContent: names[index] });
    chip.style.background = colour;
    return chip;
  });
  const entry = (name, ...parts) => entries.push(element("span", { className: "entry" }, name, ...parts));
  const columns = Math.floor(panel.num_token_slices / 2), few = panel.colours.slice(0, 8);
  entry("micro-batch ", ...chips(few.map((row) => row[columns]), [...few.keys()]), panel.colours.length > 8 ? "…" : "");
  if (panel.num_token_slices > 1) {
    const row = panel.colours[0], steps = row.length > 8 ? [0, 1, 2, 3, 4, 5, 6, 7].map((step) => Math.round(step * (row.length - 1) / 7)) : [...row.keys()];
    entry("token slice ", ...chips(steps.map((step) => row[step]), steps));
  }
  const sample = (kind, stripe) => {
    const ratio = window.devicePixelRatio || 1;
    const canvas = element("canvas", { width: 30 * ratio, height: 18 * ratio }), pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    fillOp(pen, kind, 0, 0, 30, 18, panel.colours[0][columns]);
    if (stripe) { pen.fillStyle = "rgb(31 35 40 / 0.62)"; pen.fillRect(0, 0, 30, 3.6); }
    return canvas;
  };
  const there = new Set();
  for (const each of data.panels) for (const ops of each.ranks) for (const kind of ops.kind) there.add(kind);
  [...there].sort().forEach((kind) => entry(sample(kind, false), ` ${KINDS[kind].name}`));
  if (panel.num_model_chunks > 1) entry(sample(0, true), ` model chunk ${panel.num_model_chunks - 1}`);
  if (data.panels.some((each) => each.ranks.some((ops) => ops.copies.length))) {
    ["to host", "from host"].forEach((way, lane) => {
      const canvas = element("canvas", { width: 30, height: LANE }), pen = canvas.getContext("2d");
      pen.fillStyle = COPY_COLOURS[lane];
      pen.fillRect(0, 0, 30, LANE);
      entry(canvas, ` copy ${way}`);
    });
  }
  document.getElementById("legend").append(...entries);
}

readColours();
const views = data.panels.map((panel) => new View(panel));
legend();
document.getElementById("critical").addEventListener("change", redraw);
document.getElementById("zoom-in").addEventListener("click", () => zoom(1 / 1.6, middle()));
document.getElementById("zoom-out").addEventListener("click", () => zoom(1.6, middle()));
document.getElementById("reset").addEventListener("click", reset);
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  readColours();
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
addEventListener("resize", redraw);

// Paper is white and wide, whatever the screen is.
const PAPER = "1040px";
let themeOnScreen;
function drawOn(width) {
  readColours();
  for (const each of views) { each.canvas.style.width = width; each.draw(); }
}
addEventListener("beforeprint", () => {
  themeOnScreen = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  drawOn(PAPER);
});
addEventListener("afterprint", () => {
  if (themeOnScreen) document.documentElement.dataset.theme = themeOnScreen;
  else delete document.documentElement.dataset.theme;
  drawOn("");
});
addEventListener("keydown", (event) => {
  const moves = {
    "+": () => zoom(1 / 1.6, middle()), "=": () => zoom(1 / 1.6, middle()), "-": () => zoom(1.6, middle()),
    "0": reset, ArrowLeft: () => pan((view.from - view.to) / 8), ArrowRight: () => pan((view.to - view.from) / 8),
  };
  if (moves[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); moves[event.key](); }
});
reset();
views.forEach((each) => each.draw()); // at once, since events may come before the next frame
