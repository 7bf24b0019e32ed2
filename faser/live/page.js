// Asks the server for its last minutes once a second and draws them. What is shown is either fresh or marked as old.
"use strict";

const BIN = 5;         // seconds of one point of a chart
const NOW = 10;        // seconds behind a figure of "now"
const PATIENCE = 4000; // ms without an answer after which what is shown is old
const TEST = 15000;    // ms between two looks at an A/B test
const COLOURS = ["c1", "c2", "c3", "c4"];

const $ = (id) => document.getElementById(id);
const seconds = new Map(); // t -> the server's `Second`
let last = null;           // its last answer
let answered = 0;          // when that came, by our clock
let test = null;           // an A/B test's summary, if one runs
let tested = 0;            // when that came, by our clock
let trouble = "";          // why there is none now
const known = [];          // names of policies and arms so far

class WrongKey extends Error {}

async function fetched(route) {
  const answer = await fetch(route, {
    headers: { Authorization: `Bearer ${sessionStorage.getItem("faser-key")}` },
    cache: "no-store", signal: AbortSignal.timeout(PATIENCE),
  });
  if (answer.status === 401) throw new WrongKey();
  if (answer.status === 404) throw new Error("It has no such page now: restarted without an admin key?");
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said;
}

async function poll() {
  const newest = Math.max(0, ...seconds.keys());
  try {
    take(await fetched(`live?since=${Math.max(0, newest - 30)}`)); // a long step adds to seconds that have passed
    if (!last.engines.some((e) => e.arms)) test = null;
    else if (Date.now() - tested > TEST) [test, tested] = [await fetched("ab/summary"), Date.now()];
    trouble = "";
  } catch (error) {
    if (error instanceof WrongKey) ask("The key is wrong.");
    else trouble = error instanceof TypeError || error.name === "TimeoutError" ? "" : error.message;
  }
}

function take(answer) {
  for (const second of answer.seconds) {
    seconds.set(second.t, second);
    const name = second.arm || second.policy;
    if (name && !known.includes(name)) known.push(name);
  }
  for (const t of seconds.keys()) if (t < answer.now - answer.span - BIN) seconds.delete(t);
  [last, answered] = [answer, Date.now()];
}

const now = () => figures(Math.floor(last.now) - NOW, Math.floor(last.now));

function tiles(fresh) {
  const p = fresh ? now() : {};
  const policies = [...new Set(last.engines.map((e) => e.policy + (e.benched ? " (benched)" : "")))];
  const shown = {
    "policy": fresh ? policies.join(", ") : "–", "running": text(p.running), "waiting": text(p.waiting),
    "tokens/s": text(p.tokens), "tokens a request-step": text(p.emitted), "acceptance": text(p.acceptance, "%"),
    "KV cache": text(p.kv, "%"), "step": text(p.step, "ms"),
  };
  $("tiles").replaceChildren(...Object.entries(shown).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function engines() {
  $("engines").replaceChildren(...last.engines.map((e, i) => row([
    String(i), e.policy + (e.benched ? ", benched" : ""), clock(e.since), e.decisions.toLocaleString("en"),
    Object.entries(e.fallbacks).map(([reason, n]) => `${reason} ${n.toLocaleString("en")}`).join(", ") || "none",
  ])));
}

function say(message, bad) {
  if ($("state").textContent !== message) $("state").textContent = message; // read out when it changes, not each second
  $("state").className = bad ? "bad" : "";
}

function show() {
  const fresh = last !== null && Date.now() - answered < PATIENCE && !trouble;
  const since = last === null ? "" : ` What is shown is from ${clock(last.now)}.`;
  say(fresh ? "Live" : `The server does not answer. ${trouble}${since}`.replace(/ +/g, " "), !fresh);
  $("clock").textContent = fresh ? clock(last.now) : "";
  document.body.classList.toggle("stale", !fresh);
  $("live").hidden = last === null;
  if (last === null) return;
  tiles(fresh);
  if (!fresh) return;
  const all = points();
  for (const chart of CHARTS) draw(chart, all);
  engines();
  abTest();
}

function ask(message) {
  sessionStorage.removeItem("faser-key");
  [last, test, tested, trouble] = [null, null, 0, ""];
  seconds.clear();
  $("live").hidden = true;
  $("ask").hidden = false;
  $("clock").textContent = "";
  say(message, message.includes("wrong"));
  $("key").focus();
}

let running = false;

async function run() {
  if (running) return;
  running = true;
  while (sessionStorage.getItem("faser-key")) {
    const started = Date.now();
    if (!document.hidden) await poll();
    if (sessionStorage.getItem("faser-key")) show();
    await new Promise((done) => setTimeout(done, Math.max(100, 1000 - (Date.now() - started))));
  }
  running = false;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  $("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) return ask("The key is wrong: a key is ASCII without blanks.");
  sessionStorage.setItem("faser-key", key);
  $("ask").hidden = true;
  say("Asking");
  run();
});
document.addEventListener("visibilitychange", () => { if (last !== null) show(); });
build();
if (sessionStorage.getItem("faser-key")) run();
else ask("The admin key, please.");
