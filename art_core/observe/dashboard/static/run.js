// The page of one run: curves that follow the store, events as they come, knobs.
import { Drawer, eventMarks, flatRange, insert, layoutOf, number, plain, seriesColor, smoothed, timeUnit } from "./charts.js";

const page = document.getElementById("run");
const here = `/runs/${encodeURIComponent(page.dataset.run)}`;
const series = new Map(); // by name
const figures = [...document.querySelectorAll("figure[data-chart]")];
const specs = new Map(figures.map((figure) => [figure, JSON.parse(figure.dataset.chart)]));
const needed = (spec) => (spec.spread ? [...spec.names, spec.spread] : spec.names);
const axis = document.getElementById("axis");
const smoothing = document.getElementById("smoothing");
const form = document.getElementById("knobs");
let startedAt = 0;
let position = null;
let marks = [...document.querySelectorAll("#events li time")].map((time) => ({
  time: Date.parse(time.dateTime) / 1000,
  kind: time.parentElement.querySelector(".kind").textContent,
  message: time.parentElement.querySelector(".said").textContent,
  tone: time.parentElement.querySelector(".kind").classList[1] ?? "",
}));

// -- curves ------------------------------------------------------------------------------------------
const xOf = (one) => {
  if (axis.value === "step") return { x: [...one.steps], title: "step" };
  const last = (one.times.at(-1) ?? startedAt) - startedAt;
  const { unit, size } = timeUnit(last);
  return { x: one.times.map((t) => (t - startedAt) / size), title: unit, size };
};

/** Where a moment lies on the axis: between the steps that were written before and after it. */
const placeOf = (time, one, size) => {
  if (axis.value !== "step") return (time - startedAt) / size;
  const after = one.times.findIndex((t) => t >= time);
  if (after < 0) return one.steps.at(-1);
  if (after === 0) return one.steps[0];
  const share = (time - one.times[after - 1]) / (one.times[after] - one.times[after - 1] || 1);
  return one.steps[after - 1] + share * (one.steps[after] - one.steps[after - 1]);
};

const drawer = new Drawer((figure) => {
  const spec = specs.get(figure);
  const names = spec.names.filter((name) => series.has(name));
  if (!names.length) return null;
  const bars = spec.kind === "bars";
  const weight = bars ? 0 : Number(smoothing.value);
  const first = series.get(names[0]);
  const { title, size } = xOf(first);
  const traces = [];
  const band = spec.spread && series.get(spec.spread);
  if (band && first.steps.length === band.steps.length) {
    const edge = (sign) => ({
      x: xOf(first).x, y: first.values.map((v, i) => (v === null || band.values[i] === null ? null : v + sign * band.values[i])),
      type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false,
    });
    traces.push(edge(-1), { ...edge(1), fill: "tonexty", fillcolor: translucent(seriesColor(0), 0.16) });
  }
  names.forEach((name, index) => {
    const one = series.get(name);
    const { x } = xOf(one);
    const color = seriesColor(index);
    const common = { x, name: plain(name), metric: name, hovertemplate: "%{y:.4~g}<extra>" + plain(name) + "</extra>" };
    if (bars) {
      traces.push({ ...common, type: "bar", y: [...one.values], marker: { color } });
      return;
    }
    const few = one.steps.length < 40;
    if (weight) traces.push({ ...common, type: "scatter", mode: "lines", y: [...one.values], line: { color: translucent(color, 0.3), width: 1 }, showlegend: false, hoverinfo: "skip", hovertemplate: null });
    traces.push({ ...common, type: "scatter", mode: few && !weight ? "lines+markers" : "lines", y: smoothed(one.values, weight), line: { color, width: 2 }, marker: { size: 4 } });
  });
  const layout = layoutOf({ bars, legend: names.length > 1, xTitle: title });
  if (!bars && !band) layout.yaxis.range = flatRange(names.map((name) => series.get(name).values));
  const shown = marks.filter((mark) => mark.time >= startedAt && (mark.tone || mark.kind === "knob_turned"));
  if (shown.length && first.steps.length) {
    const placed = eventMarks(shown.map((mark) => ({ ...mark, x: placeOf(mark.time, first, size) })));
    layout.shapes = placed.shapes;
    traces.push(placed.trace);
  }
  return { traces, layout, after: letPick };
});

// A click on a point is a way to the rollouts of its step.
const picked = document.getElementById("step");
const pickable = new WeakSet();
const letPick = (plot) => {
  if (!plot.on || pickable.has(plot)) return;
  pickable.add(plot);
  plot.on("plotly_click", ({ points }) => {
    const point = points.find((p) => p.data.yaxis !== "y2");
    const one = point && series.get(point.data.metric);
    const step = one && (axis.value === "step" ? point.x : one.steps[point.pointIndex]);
    if (!Number.isInteger(step) || !picked) return;
    picked.value = step;
    picked.form.scrollIntoView({ block: "nearest" });
    picked.focus();
  });
};

function translucent(color, alpha) {
  const hex = color.replace("#", "");
  const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

const newest = (one) => { for (let i = one.values.length - 1; i >= 0; i -= 1) if (one.values[i] !== null) return one.values[i]; return null; };

const tell = (names) => {
  for (const figure of figures) {
    const spec = specs.get(figure);
    if (!needed(spec).some((name) => names.has(name))) continue;
    drawer.mark([figure]);
    const first = series.get(spec.names[0]);
    if (first && spec.names.length === 1) figure.querySelector(".last").textContent = number(newest(first));
  }
  for (const tile of document.querySelectorAll("[data-tile]")) {
    if (names.has(tile.dataset.tile)) tile.querySelector(".value").textContent = number(newest(series.get(tile.dataset.tile)));
  }
};

const load = async (wanted) => {
  const names = [...new Set(wanted)];
  if (!names.length) return;
  const query = new URLSearchParams(names.map((name) => ["name", name]));
  const answer = await fetch(`${here}/series?${query}`);
  if (!answer.ok) throw new Error(`${answer.status}`);
  const found = await answer.json();
  startedAt = found.started_at;
  for (const [name, one] of Object.entries(found.series)) series.set(name, one);
  for (const figure of figures) if (needed(specs.get(figure)).some((n) => n in found.series)) drawer.add(figure);
  return found.position;
};

const isShown = (figure) => { const folded = figure.closest("details"); return !folded || folded.open; };
const wanted = () => figures.filter(isShown).flatMap((figure) => needed(specs.get(figure)));
for (const folded of document.querySelectorAll("details.more")) {
  folded.addEventListener("toggle", () => {
    const names = [...folded.querySelectorAll("figure[data-chart]")].flatMap((f) => needed(specs.get(f)));
    if (folded.open && names.some((name) => !series.has(name))) load(names).catch(offline);
  });
}
axis.addEventListener("change", () => drawer.mark());
smoothing.addEventListener("input", () => drawer.mark());

// -- following ---------------------------------------------------------------------------------------
const connection = document.getElementById("connection");
const offline = () => { connection.textContent = "no connection; trying again"; };
let source = null;
let known = new Set();

const onEvents = (list) => {
  if (!list.length) return;
  document.getElementById("no-events")?.remove();
  const box = document.getElementById("events");
  for (const event of list) {
    const item = document.createElement("li");
    const time = document.createElement("time");
    time.dateTime = event.moment;
    time.textContent = event.moment;
    const kind = document.createElement("span");
    kind.className = `kind ${event.tone}`;
    kind.textContent = event.kind;
    const said = document.createElement("span");
    said.className = "said text";
    said.textContent = event.message;
    item.append(time, kind, said);
    box.prepend(item);
    if (event.knob) onTurn(event);
    marks = [{ time: event.at, kind: event.kind, message: event.message, tone: event.tone }, ...marks];
  }
  const count = document.getElementById("event-count");
  count.textContent = number(Number(count.textContent.replace(/\D/g, "")) + list.length);
  box.dispatchEvent(new CustomEvent("contentadded", { bubbles: true }));
  drawer.mark();
};

let told = null;
const onSigns = (signs) => {
  if (told === JSON.stringify(signs)) return; // whoever stands on a link keeps it
  told = JSON.stringify(signs);
  const said = signs.map(({ tone, title, message, see, href }) => {
    const line = document.createElement("p");
    line.className = `notice ${tone}`;
    const first = document.createElement("strong");
    first.textContent = title;
    line.append(first, ` ${message}`);
    if (see) {
      const way = document.createElement("a");
      way.href = href;
      way.textContent = see;
      line.append(" ", way);
    }
    return line;
  });
  document.getElementById("signs").replaceChildren(...said);
};

const onTurn = ({ knob, moment }) => {
  document.getElementById("no-turns")?.remove();
  const said = (value) => value ?? knob.unturned;
  const item = document.createElement("li");
  const time = document.createElement("time");
  time.dateTime = moment;
  time.textContent = moment;
  const name = document.createElement("span");
  name.className = "kind mono";
  name.textContent = knob.name;
  const change = document.createElement("span");
  change.className = "num";
  change.textContent = `${said(knob.before)} → ${said(knob.after)}`;
  item.append(time, name, change);
  const turns = document.getElementById("turns");
  turns.prepend(item);
  turns.dispatchEvent(new CustomEvent("contentadded", { bubbles: true }));
  const cell = document.querySelector(`[data-knob="${CSS.escape(knob.name)}"]`);
  if (cell) cell.textContent = knob.after ?? "–";
  const field = form?.elements.namedItem(knob.name);
  if (field && field.value === field.defaultValue) field.value = field.defaultValue = knob.after ?? "";
};

const onChange = (message) => {
  position = message.lastEventId;
  const { metrics, events, run, signs } = JSON.parse(message.data);
  const changed = new Set();
  let fresh = false;
  for (const [name, step, value, time] of metrics) {
    if (!known.has(name)) fresh = true;
    if (!series.has(name)) continue;
    insert(series.get(name), step, value, time);
    changed.add(name);
  }
  if (metrics.length) {
    const steps = document.getElementById("steps");
    const last = Math.max(Number(steps.textContent.replace(/\D/g, "")), ...metrics.map((m) => m[1]));
    if (picked && picked.value === picked.max && picked !== document.activeElement) picked.value = last;
    if (picked) picked.max = last;
    steps.textContent = number(last);
  }
  tell(changed);
  onEvents(events);
  onSigns(signs);
  const state = document.getElementById("state");
  state.textContent = run.word;
  state.className = `badge ${run.tone}`;
  document.getElementById("trajectories").textContent = number(run.trajectories);
  // A metric that the page has no chart for (the first step of all, for one): the page knows how to lay it out.
  if (fresh && isEdited()) connection.textContent = "there are new metrics; reload the page to see them";
  else if (fresh) location.reload();
  if (!run.going) stop();
};

// Whether a reload would take away what somebody has typed.
const isEdited = () => [...page.querySelectorAll("#knobs input")].some((field) => field.value !== field.defaultValue);

const follow = () => {
  if (source || document.hidden || page.dataset.going !== "yes") return;
  source = new EventSource(`${here}/live?${new URLSearchParams({ after: position })}`);
  source.addEventListener("open", () => { connection.textContent = ""; });
  source.addEventListener("change", onChange);
  source.addEventListener("again", () => { stop(); begin(); });
  source.addEventListener("error", () => {
    offline();
    if (source?.readyState === EventSource.CLOSED) { stop(); setTimeout(follow, 2000); }
  });
};
const stop = () => { source?.close(); source = null; };
// A browser keeps few connections to one server: those of pages that nobody sees are given back.
document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); else follow(); });

const begin = async () => {
  const all = figures.flatMap((figure) => needed(specs.get(figure)));
  known = new Set(all);
  try {
    // Without names, it is only where to begin.
    position = (await load(wanted())) ?? page.dataset.position;
  } catch {
    offline();
    setTimeout(begin, 2000);
    return;
  }
  follow();
};
begin();

// -- knobs -------------------------------------------------------------------------------------------
const WEIGHTS = "reward_weights/"; // before a component's name
form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const said = document.getElementById("knobs-said");
  const values = {};
  for (const input of form.querySelectorAll("input[name]")) {
    const text = input.value.trim();
    if (text === input.defaultValue.trim()) continue; // as it was
    const value = text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text);
    if (input.name.startsWith(WEIGHTS)) (values.reward_weights ??= {})[input.name.slice(WEIGHTS.length)] = value;
    else values[input.name] = value;
  }
  for (const wrong of form.querySelectorAll(".wrong")) wrong.textContent = "";
  for (const input of form.querySelectorAll("input[aria-invalid]")) input.removeAttribute("aria-invalid");
  if (!Object.keys(values).length) { said.textContent = "Nothing has changed."; return; }
  let answer;
  try {
    answer = await fetch(`${here}/knobs`, {
      method: "POST", body: JSON.stringify(values),
      headers: { "content-type": "application/json", "x-art-control": page.dataset.token },
    });
  } catch {
    said.textContent = "The dashboard's server does not answer; nothing was turned.";
    return;
  }
  const { errors, knobs } = await answer.json();
  if (answer.ok) {
    for (const input of form.querySelectorAll("input[name]")) {
      input.value = knobs[input.name] ?? "";
      input.defaultValue = input.value;
    }
    said.textContent = "Turned; it holds from the next training step on.";
    return;
  }
  for (const [name, message] of Object.entries(errors)) {
    const input = name && form.elements.namedItem(name);
    if (input) {
      document.getElementById(input.id.replace("knob-", "wrong-")).textContent = message;
      input.setAttribute("aria-invalid", "true");
    } else {
      said.textContent = message;
    }
  }
  form.querySelector("[aria-invalid]")?.focus();
});
