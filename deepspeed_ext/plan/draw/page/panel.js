// One panel.

class View {
  constructor(panel) {
    this.panel = panel;
    let first = 0;
    for (const ops of panel.ranks) { ops.first = first; first += ops.start.length; }
    this.critical = new Set(panel.critical);
    this.rowHeight = Math.max(9, Math.min(30, Math.floor(520 / panel.ranks.length)));
    this.lanes = Math.max(...panel.ranks.map((ops) => ops.copies.length));
    this.pitch = this.rowHeight + this.lanes * LANE + GAP;
    this.rowsHeight = panel.ranks.length * this.pitch;
    this.hasMemory = panel.memory.some((curve) => curve.time.length);
    this.height = this.rowsHeight + AXIS + (this.hasMemory ? MEMORY_GAP + MEMORY : 0);
    this.peak = Math.max(1e-30, ...[...panel.memory, ...panel.host_memory].map((curve) => curve.value.reduce((most, one) => Math.max(most, one), 0)));
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", [panel.title, panel.extents, ...panel.figures.map(([name, value]) => `${name} ${value}`)].join(", "));
    const figures = panel.figures.map(([name, value]) => element("div", {}, element("b", { textContent: value }), element("span", { textContent: name })));
    document.getElementById("panels").append(element("section", { className: "panel" },
      element("div", { className: "head" },
        element("div", {}, element("h2", { textContent: panel.title }), element("div", { className: "extents", textContent: panel.extents })),
        element("div", { className: "figures" }, ...figures)),
      this.canvas));
    this.listen();
  }

  x(time) { return LEFT + (time - view.from) / (view.to - view.from) * (this.width - LEFT - RIGHT); }
  timeAt(x) { return view.from + (x - LEFT) / (this.width - LEFT - RIGHT) * (view.to - view.from); }
  // As many as have room for their numbers.
  get mostTimes() { return Math.max(2, Math.min(12, Math.floor((this.width - LEFT - RIGHT) / 62))); }
  rowTop(rank) { return rank * this.pitch; }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    if (this.canvas.width !== Math.round(this.width * ratio)) {
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.height = `${this.height}px`;
    }
    const pen = this.pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    this.drawGrid();
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height);
    pen.clip();
    this.panel.ranks.forEach((ops, rank) => { this.drawRank(ops, rank); this.drawCopies(ops, rank); });
    if (document.getElementById("critical").checked) this.drawCriticalPath();
    if (state.panel === this && state.op >= 0) this.drawNeeds();
    if (this.hasMemory) this.drawMemory();
    if (state.time !== null) this.drawCursor();
    pen.restore();
    this.drawNames();
  }

  drawGrid() {
    const { pen } = this;
    pen.font = "11px sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    for (const time of roundTimes(view.from, view.to, this.mostTimes)) {
      const x = Math.round(this.x(time)) + 0.5;
      pen.strokeStyle = colours.line;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, this.rowsHeight + 4);
      pen.stroke();
      pen.fillStyle = colours.soft;
      pen.fillText(shown(time, this.panel.unit, view.to), x, this.rowsHeight + 16);
    }
  }

  drawRank(ops, rank) {
    const { pen, panel, rowHeight } = this, y = this.rowTop(rank);
    const faded = document.getElementById("critical").checked;
    pen.fillStyle = colours.track;
    const from = Math.max(this.x(0), LEFT);
    pen.fillRect(from, y, Math.max(0, Math.min(this.x(panel.makespan), this.width - RIGHT) - from), rowHeight);
    let covered = -1;
    for (let index = firstEndingAfter(ops.end, view.from); index < ops.start.length && ops.start[index] <= view.to; index++) {
      const x = this.x(ops.start[index]), end = this.x(ops.end[index]);
      if (end <= covered) continue;
      const width = Math.max(end - x, 0.5), thin = width < 4;
      covered = width < 1 ? Math.floor(x) + 1 : end;
      const gap = thin ? 0 : 0.6;
      const colour = panel.colours[ops.micro_batch[index]][ops.token_slice[index]];
      pen.globalAlpha = faded && !this.critical.has(ops.first + index) ? 0.3 : 1;
      // Of ops thinner than a pixel one stands for its neighbours, whatever their kinds.
      const kind = width < 1 ? 0 : ops.kind[index];
      fillOp(pen, kind, x + gap, y, Math.max(width - 2 * gap, thin ? Math.max(width, 1) : 0), rowHeight, colour);
      const low = rowHeight * (1 - KINDS[ops.kind[index]].height);
      const modelChunk = Math.floor(ops.stage[index] / panel.ranks.length);
      const stripe = (rowHeight - low) * 0.2 * modelChunk / Math.max(panel.num_model_chunks - 1, 1);
      if (stripe) {
        pen.fillStyle = "rgb(31 35 40 / 0.62)";
        pen.fillRect(x + gap, y + low, width - 2 * gap, stripe);
      }
      if (width >= 18) this.drawLabel(label(panel, ops, index), x, y + low + stripe, width, rowHeight - low - stripe);
    }
    pen.globalAlpha = 1;
  }

  // Copies to the host, and below them those back.
  drawCopies(ops, rank) {
    const { pen } = this;
    ops.copies.forEach((copies, lane) => {
      const y = this.rowTop(rank) + this.rowHeight + lane * LANE + 1;
      pen.fillStyle = COPY_COLOURS[lane];
      for (let index = firstEndingAfter(copies.end, view.from); index < copies.start.length && copies.start[index] <= view.to; index++) {
        const x = this.x(copies.start[index]), width = this.x(copies.end[index]) - x;
        pen.fillRect(x + Math.min(0.5, width * 0.1), y, Math.max(width - 1, width * 0.8), LANE - 2);
      }
    });
  }

  drawLabel(text, x, y, width, height) {
    const { pen } = this, size = Math.min(12, height * 0.6, (width - 4) / (text.length * 0.58));
    if (size < 8) return;
    pen.fillStyle = "#1f2328";
    pen.font = `${size}px sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(text, x + width / 2, y + height / 2);
  }

  // The outline of an op; also of one thinner than a pixel.
  outline(number, colour) {
    const { pen } = this, [rank, index] = place(this.panel, number), ops = this.panel.ranks[rank];
    const x = this.x(ops.start[index]), width = Math.max(this.x(ops.end[index]) - x, 1);
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.strokeRect(x, this.rowTop(rank) + 1, width, this.rowHeight - 2);
  }

  join(from, to, colour) {
    const { pen } = this, [rank, index] = place(this.panel, from), [ownRank, own] = place(this.panel, to);
    pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(this.x(this.panel.ranks[rank].end[index]), this.rowTop(rank) + this.rowHeight / 2);
    pen.lineTo(this.x(this.panel.ranks[ownRank].start[own]), this.rowTop(ownRank) + this.rowHeight / 2);
    pen.stroke();
  }

  drawCriticalPath() {
    const path = this.panel.critical;
    for (let step = 1; step < path.length; step++) {
      const [rank, index] = place(this.panel, path[step - 1]), [next, own] = place(this.panel, path[step]);
      const left = this.panel.ranks[rank].end[index], right = this.panel.ranks[next].start[own];
      if (rank !== next && right >= view.from && left <= view.to) this.join(path[step - 1], path[step], colours.accent);
    }
  }

  drawNeeds() {
    const number = this.panel.ranks[state.rank].first + state.op;
    for (const needed of this.panel.ranks[state.rank].needs[state.op]) {
      this.outline(needed, colours.link);
      this.join(needed, number, colours.link);
    }
    this.outline(number, colours.ink);
  }

  drawMemory() {
    const { pen, panel } = this, top = this.rowsHeight + AXIS + MEMORY_GAP, bottom = top + MEMORY - 4;
    const y = (value) => bottom - value / this.peak * (bottom - top - 6);
    pen.fillStyle = colours.card;
    pen.fillRect(LEFT, top - 4, this.width, MEMORY + 4);
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    for (const time of roundTimes(view.from, view.to, this.mostTimes)) {
      const x = Math.round(this.x(time)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, bottom);
      pen.stroke();
    }
    for (const share of [0, 0.5, 1]) {
      pen.beginPath();
      pen.moveTo(LEFT, Math.round(y(this.peak * share)) + 0.5);
      pen.lineTo(this.width - RIGHT, Math.round(y(this.peak * share)) + 0.5);
      pen.stroke();
    }
    const ranks = panel.memory.map((_, rank) => rank);
    const chosen = state.panel === this ? state.rank : -1;
    if (chosen >= 0) ranks.push(ranks.splice(chosen, 1)[0]);
    const curves = ranks.map((rank) => [rank, panel.memory[rank], []]);
    if (panel.host_memory.length) curves.push(...ranks.map((rank) => [rank, panel.host_memory[rank], [5, 3]]));
    for (const [rank, curve, dashes] of curves) {
      const points = curve.time.length;
      pen.setLineDash(dashes);
      let index = Math.max(0, firstEndingAfter(curve.time, view.from) - 1), covered = -1;
      pen.strokeStyle = this.rankColour(rank);
      pen.globalAlpha = chosen < 0 || chosen === rank ? 1 : 0.25;
      pen.lineWidth = chosen === rank ? 2.5 : 1.4;
      pen.beginPath();
      let level = index ? curve.value[index - 1] : 0;
      pen.moveTo(this.x(Math.min(view.from, curve.time[0] ?? 0)), y(level));
      for (; index < points && curve.time[index] <= view.to; index++) {
        const x = this.x(curve.time[index]);
        // Of many steps within a pixel, the highest is what matters.
        if (x < covered + 0.5 && curve.value[index] < level) { level = curve.value[index]; continue; }
        pen.lineTo(x, y(level));
        level = curve.value[index];
        pen.lineTo(x, y(level));
        covered = x;
      }
      pen.lineTo(this.x(Math.min(view.to, panel.makespan)), y(level));
      pen.stroke();
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
    this.memoryY = y;
  }

  rankColour(rank) {
    const share = this.panel.ranks.length > 1 ? rank / (this.panel.ranks.length - 1) : 0;
    return `hsl(${220 - 200 * share} 65% 52%)`;
  }

  drawCursor() {
    const { pen } = this, x = Math.round(this.x(state.time)) + 0.5;
    pen.strokeStyle = colours.soft;
    pen.lineWidth = 1;
    pen.setLineDash([4, 4]);
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, this.height);
    pen.stroke();
    pen.setLineDash([]);
  }

  drawNames() {
    const { pen, panel } = this;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.font = `${Math.min(13, this.rowHeight * 0.75)}px sans-serif`;
    panel.ranks.forEach((ops, rank) => {
      const own = state.panel === this && state.rank === rank;
      pen.fillStyle = own ? colours.ink : colours.soft;
      pen.fillText(ops.name, LEFT - 10, this.rowTop(rank) + this.rowHeight / 2);
      pen.fillStyle = this.rankColour(rank);
      if (this.hasMemory) pen.fillRect(LEFT - 7, this.rowTop(rank), 4, this.rowHeight);
    });
    if (!this.hasMemory) return;
    pen.font = "11px sans-serif";
    pen.fillStyle = colours.soft;
    for (const share of [0, 0.5, 1]) {
      pen.fillText(String(Number((this.peak * share).toPrecision(3))), LEFT - 10, this.memoryY(this.peak * share));
    }
    pen.textAlign = "left";
    const dashed = panel.host_memory.length ? "; dashed: on the host" : "";
    pen.fillText(`${panel.memory_unit}: a line for each rank, in the colour beside its name${dashed}`, LEFT + 4, this.rowsHeight + AXIS + 4);
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        pan((event.deltaX || event.deltaY) / this.width * (view.to - view.from));
      } else {
        zoom(Math.exp(event.deltaY * 0.0016), this.timeAt(event.offsetX));
      }
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.grabbed = event.offsetX;
      canvas.classList.add("moving");
    });
    canvas.addEventListener("pointerup", () => { this.grabbed = undefined; canvas.classList.remove("moving"); });
    canvas.addEventListener("pointermove", (event) => {
      if (this.grabbed !== undefined) {
        pan(this.timeAt(this.grabbed) - this.timeAt(event.offsetX));
        this.grabbed = event.offsetX;
      }
      this.point(event);
    });
    canvas.addEventListener("pointerleave", () => {
      Object.assign(state, { panel: null, rank: -1, op: -1, time: null });
      document.getElementById("tooltip").hidden = true;
      redraw();
    });
    canvas.addEventListener("dblclick", reset);
  }

  point(event) {
    const { panel } = this, time = this.timeAt(event.offsetX);
    const row = Math.floor(event.offsetY / this.pitch);
    const rank = row < panel.ranks.length ? row : -1;
    let op = -1;
    const lane = Math.floor((event.offsetY - this.rowTop(row) - this.rowHeight) / LANE);
    if (rank >= 0 && lane < 0) {
      const ops = panel.ranks[rank], index = firstEndingAfter(ops.end, time);
      if (index < ops.start.length && ops.start[index] <= time) op = index;
    }
    Object.assign(state, { panel: this, rank, op, time });
    const text = op >= 0 ? this.describe(rank, op) : this.describeCopy(rank, lane, time) || this.describeTime(rank, time);
    const tooltip = document.getElementById("tooltip");
    tooltip.textContent = text;
    tooltip.hidden = !text;
    const right = event.clientX + 16 + tooltip.offsetWidth < window.innerWidth;
    tooltip.style.left = `${right ? event.clientX + 16 : event.clientX - 16 - tooltip.offsetWidth}px`;
    tooltip.style.top = `${Math.max(4, Math.min(event.clientY + 16, window.innerHeight - tooltip.offsetHeight - 6))}px`;
    redraw();
  }

  describe(rank, index) {
    const { panel } = this, ops = panel.ranks[rank], unit = panel.unit;
    const time = (value) => shown(value, unit);
    const before = index ? ops.end[index - 1] : 0;
    const lines = [
      `${opName(panel, rank, index)}  ${KINDS[ops.kind[index]].name} of token slice ${ops.token_slice[index]} of micro-batch ${ops.micro_batch[index]} on stage ${ops.stage[index]}`,
      `${time(ops.start[index])} to ${time(ops.end[index])}, takes ${time(ops.end[index] - ops.start[index])}`,
    ];
    const idle = ops.start[index] - before;
    if (idle > panel.makespan * 1e-9) lines.push(`${ops.name} was idle for ${time(idle)} before it`);
    for (const number of ops.needs[index]) {
      const [other, needed] = place(panel, number), source = panel.ranks[other], end = source.end[needed];
      const arrival = other === rank ? null : source.arrival[needed] ?? null, there = arrival ?? end;
      const sent = arrival === null ? "" : `, here at ${time(arrival)}`;
      const held = there > before ? `, and waits ${time(Math.min(there, ops.start[index]) - before)} for it` : "";
      lines.push(`needs ${opName(panel, other, needed)}, done at ${time(end)}${sent}${held}`);
    }
    if (this.critical.has(ops.first + index)) lines.push("on the critical path");
    else if (ops.slack[index] > panel.makespan * 1e-9) lines.push(`could end ${time(ops.slack[index])} later without delay of the whole`);
    else lines.push("a later end would delay the whole");
    if (this.hasMemory) lines.push(`memory of ${ops.name}: ${Number(valueAt(panel.memory[rank], state.time).toPrecision(4))}`);
    if (panel.host_memory.length) lines.push(`on its host: ${Number(valueAt(panel.host_memory[rank], state.time).toPrecision(4))}`);
    return lines.join("\n");
  }

  describeCopy(rank, lane, time) {
    const copies = rank >= 0 ? this.panel.ranks[rank].copies[lane] : undefined;
    if (!copies) return "";
    const index = firstEndingAfter(copies.end, time), at = (value) => shown(value, this.panel.unit);
    if (index >= copies.start.length || copies.start[index] > time) return "";
    return `${copies.name[index]}\n${at(copies.start[index])} to ${at(copies.end[index])}, takes ${at(copies.end[index] - copies.start[index])}`;
  }

  describeTime(rank, time) {
    const { panel } = this;
    if (time < 0 || time > panel.makespan) return "";
    if (rank >= 0) return `${panel.ranks[rank].name} is idle at ${shown(time, panel.unit)}`;
    if (!this.hasMemory) return "";
    const held = panel.memory.map((curve, each) => `${panel.ranks[each].name}: ${Number(valueAt(curve, time).toPrecision(4))}`);
    return [`${panel.memory_unit} at ${shown(time, panel.unit)}`, ...held.slice(0, 24)].join("\n");
  }
}
