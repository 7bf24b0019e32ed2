// What the page makes of the server's numbers, and how it writes them.
"use strict";

const sum = (values) => values.reduce((a, b) => a + b, 0);
const ratio = (a, b) => (b > 0 ? a / b : null);

// What the seconds from..to came to. null: there is nothing to divide by.
function figures(from, to) {
  const found = [];
  for (let t = from; t < to; t++) if (seconds.has(t)) found.push(seconds.get(t));
  const total = (name) => sum(found.map((s) => s[name]));
  const lengths = found.length ? found[0].lengths.map((_, k) => sum(found.map((s) => s.lengths[k]))) : [];
  const rows = sum(lengths), verified = sum(lengths.map((n, k) => n * k));
  const accepted = total("accepted"), written = total("written"), span = to - from;
  return {
    t: from, running: total("running") / span, waiting: total("waiting") / span,
    kv: ratio(total("kv"), total("busy")), step: ratio(1000 * total("busy"), total("steps")),
    own: rows / span, drafted: Math.max(written - rows, 0) / span, tokens: written / span, wasted: (verified - accepted) / span,
    acceptance: ratio(accepted, verified), length: ratio(verified, rows), emitted: ratio(written, rows),
    depth: ratio(total("depth"), total("steps")), shares: lengths.map((n) => ratio(n, rows)),
    name: found.length ? found.at(-1).arm || found.at(-1).policy : null,
  };
}

// Every point of the charts, oldest first; the newest is of the seconds that are over.
function points() {
  const end = Math.floor(last.now), all = [];
  for (let t = Math.ceil((end - last.span) / BIN) * BIN; t < end; t += BIN) all.push(figures(t, Math.min(t + BIN, end)));
  return all;
}

// A number to three digits, a dash if there is none; a share if the unit is "%".
function text(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const shown = (unit === "%" ? 100 * value : value).toLocaleString("en", { maximumSignificantDigits: 3 });
  return `${shown.replace("-", "−")} ${unit}`.trim();
}

const clock = (t) => new Date(1000 * t).toLocaleTimeString([], { hour12: false });
const most = (all, of) => Math.max(0, ...all.map(of).filter((v) => v !== null));

// The first of 1, 2, 5, 10, 20 ... that is not under `value`.
function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((m) => m * unit).find((m) => m >= value);
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const row = (cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
