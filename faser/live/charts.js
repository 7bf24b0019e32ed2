// The charts of the last minutes.
"use strict";

// Each: title, its series as [label, value of a point], what it says of a point "now", and how it is drawn.
const CHARTS = [
  { title: "Load", stack: true,
    series: [["running", (p) => p.running], ["waiting", (p) => p.waiting]],
    says: (p, all) => `${text(p.running)} running, ${text(p.waiting)} waiting; ${text(most(all, (q) => q.running + q.waiting))} at most` },
  { title: "Goodput", stack: true,
    series: [["by the target itself", (p) => p.own], ["drafts accepted", (p) => p.drafted]],
    says: (p) => `${text(p.tokens)} tokens/s, ${text(p.drafted)} of them drafted; ${text(p.wasted)} more verified in vain` },
  { title: "Lengths chosen", heat: true, series: [["share of request-steps", null]],
    says: (p) => `mean ${text(p.length)} a request-step, 0 counted; ${text(p.shares[0] ?? null, "%")} verify none` },
  { title: "Acceptance", top: 1, series: [["of what was verified", (p) => p.acceptance]],
    says: (p) => `${text(p.acceptance, "%")}; ${text(p.emitted)} tokens emitted a request-step` },
  { title: "Depth and length",
    series: [["tokens drafted", (p) => p.depth], ["verified, mean", (p) => p.length]],
    says: (p) => `${text(p.depth)} drafted for each request, ${text(p.length)} verified` },
  { title: "Step", series: [["milliseconds", (p) => p.step]],
    says: (p) => `${text(p.step, "ms")} a step; KV cache ${text(p.kv, "%")} in use` },
  { title: "In force", band: true, series: [], says: (p, all) => (names(all).length ? `now ${p.name ?? "idle"}` : "nothing ran") },
];

// The policies or arms of the points. Each keeps its colour.
const names = (all) => known.filter((name) => all.some((p) => p.name === name));

const keyed = (label, i) => element("span", {}, element("i", { class: COLOURS[i % COLOURS.length] }), label);

function build() {
  for (const chart of CHARTS) {
    chart.canvas = element("canvas", { role: "img", class: chart.band ? "low" : "" });
    chart.keys = element("span", { class: "keys" }, ...chart.series.map(([label], i) => keyed(label, i)));
    chart.line = element("span", { class: "says" });
    $("charts").append(element("figure", { class: chart.band ? "across" : "" },
      element("figcaption", {}, element("h2", {}, chart.title), chart.keys, chart.line), chart.canvas));
  }
}

function draw(chart, all) {
  const { canvas } = chart, scale = devicePixelRatio || 1, w = canvas.clientWidth, h = canvas.clientHeight;
  [canvas.width, canvas.height] = [w * scale, h * scale];
  const g = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`);
  g.scale(scale, scale);
  g.font = "12px system-ui, sans-serif";
  const box = { x: 34, y: 8, w: w - 42, h: h - 28 }, step = box.w / all.length;
  const x = (i) => box.x + i * step;
  g.fillStyle = colour("muted");
  g.textBaseline = "alphabetic";
  g.fillText("5 min ago", box.x, h - 5);
  g.textAlign = "right";
  g.fillText("now", box.x + box.w, h - 5);
  if (chart.heat) heat(g, all, box, x, step, colour);
  else if (chart.band) band(g, chart, all, box, x, step, colour);
  else lines(g, chart, all, box, x, step, colour);
  chart.line.textContent = chart.says(now(), all);
  canvas.setAttribute("aria-label", `${chart.title}, last five minutes. Now: ${chart.line.textContent}`);
}

function lines(g, chart, all, box, x, step, colour) {
  const values = all.map((p) => chart.series.map(([, of]) => of(p)));
  const tops = values.map((v) => (chart.stack ? sum(v) : Math.max(...v)));
  const top = chart.top ?? nice(Math.max(0, ...tops));
  const y = (v) => box.y + box.h * (1 - v / top);
  g.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    g.fillStyle = colour("line");
    g.fillRect(box.x, Math.round(y(part * top)), box.w, 1);
    g.fillStyle = colour("muted");
    g.fillText((part * top).toLocaleString("en", { notation: "compact" }), box.x - 5, y(part * top));
  }
  const floor = all.map(() => 0);
  chart.series.forEach((_, s) => {
    g.fillStyle = g.strokeStyle = colour(COLOURS[s]);
    g.lineWidth = 2;
    g.beginPath();
    all.forEach((_, i) => {
      const value = values[i][s];
      if (value === null) return;
      if (chart.stack) {
        g.fillRect(x(i), y(floor[i] + value), step + 0.5, y(floor[i]) - y(floor[i] + value));
        floor[i] += value;
      } else if (i && values[i - 1][s] !== null) g.lineTo(x(i + 0.5), y(value));
      else { g.moveTo(x(i), y(value)); g.lineTo(x(i + 0.5), y(value)); }
    });
    if (!chart.stack) g.stroke();
  });
}

function heat(g, all, box, x, step, colour) {
  const rows = Math.max(1, ...all.map((p) => p.shares.length)), tall = box.h / rows;
  g.textBaseline = "middle";
  for (let k = 0; k < rows; k++) {
    const y = box.y + (rows - 1 - k) * tall;
    g.globalAlpha = 1;
    g.fillStyle = colour("muted");
    g.fillText(String(k), box.x - 5, y + tall / 2);
    g.fillStyle = colour("c1");
    all.forEach((p, i) => {
      g.globalAlpha = p.shares[k] ? 0.1 + 0.9 * p.shares[k] : 0;
      g.fillRect(x(i), y + 0.5, step + 0.3, tall - 1);
    });
  }
  g.globalAlpha = 1;
}

function band(g, chart, all, box, x, step, colour) {
  chart.keys.replaceChildren(...names(all).map((name) => keyed(name, known.indexOf(name))));
  all.forEach((p, i) => {
    if (!p.name) return;
    g.fillStyle = colour(COLOURS[known.indexOf(p.name) % COLOURS.length]);
    g.fillRect(x(i), box.y, step + 0.5, box.h);
  });
}
