// The console: sends a prompt, shows the origin of each token, and draws the service's figures. The
// code for chats is in markdown.js and chat.js, which follow this file in the page.
"use strict";

const $ = (id) => document.getElementById(id);
const POINTS = 120; // two minutes with one figure a second
const RETRY_MS = 2000;
const CODE = 'def read_lines(path):\n    """'; // for a model that continues texts
let shown = ""; // the model's name
let drafters = []; // their order chooses their colours
let running = null; // AbortController of the answer under way
let advised = 0; // the model's own temperature

// -- reading -------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Yields the JSON of each server-sent event. EventSource is not used because it cannot send a key.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function problem(response) {
  const wait = response.headers.get("retry-after");
  let message = response.statusText;
  try {
    message = (await response.json()).error.message;
  } catch (error) {
    message = message || String(error);
  }
  return `${response.status}: ${message}${wait ? ` (try again in ${wait} s)` : ""}`;
}

// -- one answer ----------------------------------------------------------------------------------

// The options that chats and completions share, and the longest answer by the endpoint's name.
function options(limit) {
  const fields = {};
  for (const [id, name] of Object.entries({ limit, k_draft: "k_draft", temperature: "temperature" })) {
    if ($(id).value !== "") fields[name] = Number($(id).value);
  }
  if ($("drafter").value) fields.drafter = $("drafter").value;
  return fields;
}

// A token about which the grammar left no choice has a style of its own.
function colour(origin) {
  return origin === "grammar" ? "by-grammar" : `draft-${Math.max(0, drafters.indexOf(origin)) % 5}`;
}

function maker(origin) {
  if (origin === "target") return "the target itself";
  return origin === "grammar" ? "left no choice by the grammar" : `drafted by ${origin}`;
}

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// A piece of text in the style of its origin.
function stretch(text, origin) {
  const span = element("span", origin === "target" ? "" : colour(origin), text);
  if (origin !== "target") span.title = maker(origin);
  return span;
}

function showTokens(tokens, made) {
  const answer = $("answer");
  const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
  for (const token of tokens) {
    made[token.origin] = (made[token.origin] || 0) + 1;
    answer.append(stretch(token.text, token.origin));
  }
  if (atEnd) answer.scrollTop = answer.scrollHeight;
  showLegend(made);
}

function showLegend(made, list = "legend") {
  const items = Object.entries(made).map(([origin, count]) => {
    const name = element("span", origin === "target" ? "" : colour(origin), maker(origin));
    return element("li", "", name, `: ${count}`);
  });
  $(list).replaceChildren(...items);
}

// The figures while the answer comes; the last event has the service's own figures.
function showProgress(made, steps, firstMs, startMs) {
  const tokens = Object.values(made).reduce((sum, count) => sum + count, 0);
  const seconds = (performance.now() - startMs - firstMs) / 1000;
  $("f-speed").textContent = seconds > 0 ? ((tokens - 1) / seconds).toFixed(1) : "–";
  $("f-jump").textContent = steps > 1 ? ((tokens - 1) / (steps - 1)).toFixed(2) : "–";
  $("f-first").textContent = `${firstMs.toFixed(0)} ms`;
  $("f-accepted").textContent = `${tokens - (made.target || 0)}`;
}

function showFigures(answer) {
  const details = answer.details;
  const firstMs = (details.queue_seconds + details.prefill_seconds) * 1000;
  $("f-speed").textContent = answer.tokens_per_second.toFixed(1);
  $("f-jump").textContent = answer.avg_tokens_per_jump.toFixed(2);
  $("f-first").textContent = answer.generated_tokens ? `${firstMs.toFixed(0)} ms` : "–";
  $("f-latency").textContent = `${answer.latency_ms.toFixed(0)} ms`;
  $("f-accepted").textContent = `${details.accepted_tokens} of ${details.draft_tokens}`;
  const gain = details.estimated_speedup;
  $("f-gain").textContent = gain ? `${gain.toFixed(2)} ×` : "–";
  $("progress").textContent =
    `Done: ${answer.generated_tokens} tokens, ${answer.tokens_per_second.toFixed(0)} per second.`;
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

// Shows whether an answer is under way.
function busy(now) {
  running = now ? new AbortController() : null;
  for (const button of document.querySelectorAll(".send")) button.disabled = now;
  for (const button of document.querySelectorAll(".stop")) button.disabled = !now;
}

async function ask() {
  if (running) return;
  const made = {};
  const start = performance.now();
  let first = null;
  let steps = 0;
  showError("");
  for (const name of ["speed", "jump", "first", "latency", "accepted", "gain"]) {
    $(`f-${name}`).textContent = "–";
  }
  $("answer").replaceChildren();
  $("legend").replaceChildren();
  $("progress").textContent = "Generating.";
  busy(true);
  try {
    const response = await fetch("/generate", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({
        ...{ prompt: $("prompt").value, stream: true, details: true },
        ...{ max_new_tokens: -1, temperature: advised }, // -1: as many as the server allows
        ...options("max_new_tokens"),
      }),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await problem(response));
    let whole = false;
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.tokens) {
        first ??= performance.now() - start;
        steps += 1;
        showTokens(event.tokens, made);
        showProgress(made, steps, first, start);
      } else {
        whole = true;
        showFigures(event);
      }
    }
    if (!whole) throw new Error("the answer broke off");
  } catch (error) {
    const stopped = error.name === "AbortError";
    $("progress").textContent = stopped ? "Stopped." : "Failed.";
    if (!stopped) showError(error.message);
  } finally {
    busy(false);
  }
}

// -- the service's figures -----------------------------------------------------------------------

const MIB = 1 << 20;
const CHARTS = [
  { id: "speed", title: "Tokens per second", lines: ["speed"], write: (v) => v.toFixed(1) },
  { id: "jump", title: "Tokens per pass", lines: ["jump"], write: (v) => written(v, "") },
  { id: "queue", title: "Running, waiting", lines: ["running", "waiting"], write: (v) => v.toFixed(0) },
  { id: "memory", title: "Memory, MiB", lines: ["anon"], limit: "cap", write: (v) => (v / MIB).toFixed(0) },
];
const history = [];

// A figure, or a dash where nothing was measured.
function written(value, unit) {
  return value === null ? "–" : `${value.toFixed(2)}${unit}`;
}

function makeCharts() {
  const SVG = "http://www.w3.org/2000/svg";
  for (const chart of CHARTS) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const title = document.createElement("span");
    title.textContent = chart.title;
    chart.output = document.createElement("output");
    chart.output.id = `now-${chart.id}`;
    chart.output.setAttribute("aria-live", "off"); // otherwise a screen reader speaks every second
    caption.append(title, chart.output);
    chart.svg = document.createElementNS(SVG, "svg");
    chart.svg.id = `chart-${chart.id}`;
    chart.svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 100`);
    chart.svg.setAttribute("preserveAspectRatio", "none");
    chart.svg.setAttribute("role", "img");
    chart.paths = {};
    for (const [place, name] of [...chart.lines, ...(chart.limit ? [chart.limit] : [])].entries()) {
      const path = document.createElementNS(SVG, "path");
      if (name === chart.limit) path.setAttribute("class", "limit");
      else if (place) path.setAttribute("class", "second");
      chart.paths[name] = path;
      chart.svg.append(path);
    }
    figure.append(caption, chart.svg);
    $("charts").append(figure);
  }
}

function drawCharts() {
  const now = history.at(-1);
  for (const chart of CHARTS) {
    const names = Object.keys(chart.paths);
    const top = Math.max(1e-9, ...history.flatMap((point) => names.map((name) => point[name]))) * 1.1;
    for (const name of names) {
      let pen = "M"; // a line begins anew behind a gap
      const steps = history.map((point, place) => {
        if (point[name] === null) {
          pen = "M";
          return "";
        }
        const x = POINTS - history.length + place;
        const to = pen;
        pen = "L";
        return `${to}${x} ${(100 - (point[name] / top) * 100).toFixed(2)}`;
      });
      chart.paths[name].setAttribute("d", steps.join(""));
    }
    const words = names.map((name) => chart.write(now[name])).join(chart.limit ? " of " : ", ");
    chart.output.textContent = words;
    chart.svg.setAttribute("aria-label", `${chart.title}: ${words}`);
  }
}

function define(list, entries) {
  const pairs = entries.map(([term, value]) => {
    const pair = document.createElement("div");
    const dt = document.createElement("dt");
    const dd = document.createElement("dd");
    dt.textContent = term;
    dd.textContent = value;
    pair.append(dt, dd);
    return pair;
  });
  $(list).replaceChildren(...pairs);
}

function showModel(event) {
  const { state, detail, error, model, temperature, max_tokens } = event;
  const text = [state, detail, error].filter(Boolean).join(": ");
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = `state ${state}`;
  if (!model || shown === model.name) return;
  shown = model.name;
  if (!model.chat && $("prompt").value === $("prompt").defaultValue) $("prompt").value = CODE;
  showTab(model.chat ? "chat" : "completion");
  drafters = model.drafters;
  advised = temperature ?? 0;
  $("limit").placeholder = `the server's, ${Math.min(max_tokens, model.context - 1)}`;
  if (temperature !== null) $("temperature").placeholder = `the model's, ${temperature}`;
  $("drafter").replaceChildren($("drafter").options[0], ...drafters.map((name) => new Option(name, name)));
  define("model", [
    ["Name", model.name],
    ["Weights", model.quant],
    ["Parameters", `${(model.parameters / 1e6).toFixed(0)} M`],
    ["Context", `${model.context} tokens`],
    ["Slots", model.slots],
    ["KV cache", `${model.kv_tokens} tokens, ${model.kv_dtype}`],
    ["Batch invariant", model.batch_invariant ? "yes" : "no"],
    ["Threads", model.threads],
    ["Drafters", model.drafters.join(", ")],
    ["Default", model.default_drafter],
  ]);
}

function showController(event, before) {
  const { figures } = event;
  const entries = [
    ["Estimated gain", written(figures.estimated_speedup, " ×")],
    ["Draft length", written(figures.draft_length, "")],
  ];
  for (const name of drafters) {
    const gained = (figure) =>
      (figures[`${figure}_tokens_total/${name}`] ?? 0) -
      (before.figures[`${figure}_tokens_total/${name}`] ?? 0);
    const drafted = gained("draft");
    if (drafted > 0) {
      const share = (100 * gained("accepted")) / drafted;
      entries.push([`Accepted, ${name}`, `${share.toFixed(0)} % of ${drafted}`]);
    }
  }
  define("controller", entries);
}

const seen = []; // events of the last minute

function showService(event) {
  showModel(event);
  const { figures } = event;
  const last = seen.at(-1) ?? event;
  const seconds = event.seconds - last.seconds;
  const tokens = figures.generated_tokens_total - last.figures.generated_tokens_total;
  history.push({
    speed: seconds > 0 ? Math.max(0, tokens / seconds) : 0,
    jump: figures.avg_jump,
    running: figures.requests_running,
    waiting: figures.requests_waiting,
    anon: figures["memory_bytes/anon"],
    cap: figures["memory_bytes/limit"],
  });
  if (history.length > POINTS) history.shift();
  seen.push(event);
  while (event.seconds - seen[0].seconds > 60) seen.shift();
  showController(event, seen[0]);
  drawCharts();
}

// Waits for another key. To ask again without one would be refused again, every two seconds.
function otherKey() {
  return new Promise((resolve) => $("key").addEventListener("change", resolve, { once: true }));
}

async function follow() {
  for (;;) {
    try {
      const response = await fetch("/console/figures", { headers: headers() });
      if (response.status === 401) {
        const wrong = $("key").value ? "does not know this key" : "needs a key";
        $("state").textContent = `the service ${wrong}: enter one below, as API key`;
        $("state").className = "state failed";
        await otherKey();
        continue;
      }
      if (!response.ok) throw new Error(await problem(response));
      for await (const event of events(response)) showService(event);
      throw new Error("the service has ended the connection");
    } catch (error) {
      seen.length = 0; // a restarted service counts from 0 again
      $("state").textContent = `not connected: ${error.message}`;
      $("state").className = "state failed";
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

// -- a file --------------------------------------------------------------------------------------

// Puts a text file where the cursor is. No context takes more than 1 MiB.
async function insertFile() {
  const [file] = $("file").files;
  const field = $($("panel-chat").hidden ? "prompt" : "message");
  showError("");
  try {
    if (file.size > MIB) throw new RangeError();
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
    field.focus();
  } catch {
    showError(`${file.name} is not a text file in UTF-8 of at most 1 MiB: add one that is`);
  }
  $("file").value = ""; // so that the same file can be chosen again
}

// -- wiring --------------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
});
for (const button of document.querySelectorAll(".stop")) {
  button.addEventListener("click", () => running?.abort());
}
for (const button of document.querySelectorAll(".file")) {
  button.addEventListener("click", () => $("file").click());
}
$("file").addEventListener("change", insertFile);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
});
