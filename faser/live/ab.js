// What an A/B test has shown so far: `test` is the server's summary, see faser/ab/report.py.
"use strict";

// What is told of each arm.
const TOLD = [
  ["policy", (a) => a.policy ?? "–"],
  ["requests", (a) => text(a.requests)],
  ["tokens a second of steps", (a) => text(a.tokens_per_s)],
  ["time in system, p50", (a) => text(a.e2e_s?.p50, "s")],
  ["time in system, p95", (a) => text(a.e2e_s?.p95, "s")],
  ["time to first token, p50", (a) => text(a.ttft_s?.p50, "s")],
  ["time per output token, p50", (a) => text(a.tpot_s?.p50, "s")],
  ["acceptance", (a) => text(ratio(a.accepted, a.verified), "%")],
  ["fallbacks", (a) => text(sum(Object.values(a.fallbacks)))],
];

function abTest() {
  $("test").hidden = !test || !test.comparisons.length;
  if ($("test").hidden) return;
  $("conclusion").replaceChildren(...test.conclusion.map((sentence) => element("li", {}, sentence)));
  $("arms").replaceChildren(
    row(["", ...test.arms.map((a) => element("strong", {}, a.name))]),
    ...TOLD.map(([what, of]) => row([what, ...test.arms.map(of)])));
  const all = test.comparisons.flatMap((c) => c.metrics.filter((m) => m.blocks).map((m) => [c, m]));
  const ends = all.flatMap(([, m]) => [m.relative_low, m.relative_high, m.relative]).filter((v) => v !== null);
  const top = nice(Math.max(0.01, ...ends.map(Math.abs)));
  const one = test.comparisons.length === 1 ? ` of ${test.comparisons[0].arm} against ${test.comparisons[0].baseline}` : "";
  $("scale").textContent = all.length
    ? `Differences${one}, with 95 % intervals, drawn from ${text(-top, "%")} to ${text(top, "%")}` : "Differences: none yet";
  $("effects").replaceChildren(...all.map(([c, m]) => row([
    one ? m.title : `${m.title}, ${c.arm} against ${c.baseline}`, interval(c, m, top),
    change(m), `${text(m.other, m.unit)} against ${text(m.base, m.unit)}`,
  ])));
  const decided = (s) => (s.decided === null ? `not decided yet (blocks: ${s.blocks})` : `decided at ${clock(s.decided)}`);
  const sequences = test.comparisons.map((c) => `${c.arm} against ${c.baseline} is ${decided(c.sequence)}`);
  $("sequence").textContent = `For who looks again and again, on the first line: ${sequences.join("; ")}. ` +
    `Counted up to ${clock(test.until ?? last.now)}.`;
}

function change(m) {
  if (m.relative_low === null || m.relative_high === null) return `${text(m.relative, "%")}, too few blocks (${m.blocks})`;
  return `${text(m.relative, "%")} (${text(m.relative_low, "%")} to ${text(m.relative_high, "%")})`;
}

// A line from the interval's low end to its high one, a dot at the estimate, a mark at 0; the numbers stand beside it.
// Neither better nor worse where the arms had unlike shares of their requests cut short.
function interval(c, m, top) {
  const svg = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const x = (v) => 75 + 70 * Math.max(-1, Math.min(1, v / top));
  const drawn = svg("svg", { viewBox: "0 0 150 18", "aria-hidden": "true" });
  drawn.append(svg("line", { x1: 75, x2: 75, y1: 0, y2: 18, class: "zero" }));
  const good = m.differs && (m.differs > 0) === (m.better === "higher");
  const kind = m.differs && !c.cut.differs ? (good ? "better" : "worse") : "";
  if (m.relative_low !== null && m.relative_high !== null)
    drawn.append(svg("line", { x1: x(m.relative_low), x2: x(m.relative_high), y1: 9, y2: 9, class: kind }));
  if (m.relative !== null) drawn.append(svg("circle", { cx: x(m.relative), cy: 9, r: 3 }));
  return drawn;
}
