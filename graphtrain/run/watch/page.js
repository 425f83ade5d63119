// Script of the page of graphtrain watch: asks for what is new, and draws it with Vega-Lite.
// Text of a run is only ever set as text, never as HTML.

const at = (id) => document.getElementById(id);
const COLORS = ["#2f6fb5", "#e0a33e", "#5aa469", "#c8574b", "#8a63b5", "#4aa6b5", "#9a7b4f", "#7a7f87"];
const FIRST = ["loss", "validation_loss", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second",
  "memory_bytes", "data_wait_seconds", "mfu"];
const PLANNED = { step_seconds: "seconds", memory_bytes: "peak_bytes" };  // name in the plan
const SECOND = 1000, LATER = 5;

const runs = [];  // {curves, sequence, digest, width, facts, points: name → Map(interval → point)}
const charts = new Map();  // name → {view, figure}
const changed = new Set();  // names of charts to draw again
window.charts = charts;  // for tests, and for the console
const vega = window.vegaEmbed ? Promise.resolve()  // a megabyte, which tables need not wait for
  : new Promise((loaded) => at("vega").addEventListener("load", loaded));
let names = { metrics: {}, buckets: {}, colors: {} };

const color = (index) => COLORS[index % COLORS.length];
const digits = (value, places = 1) => value.toLocaleString("en-US", { maximumFractionDigits: places });
const figure = (value) => value === null || value === undefined ? "" : String(Number(value.toPrecision(5)));
const seconds = (value) => value === null || value === undefined ? "unknown"
  : value >= 5400 ? `${digits(value / 3600)} h` : value >= 90 ? `${digits(value / 60)} min`
  : value >= 1 ? `${digits(value, 2)} s` : `${digits(value * 1e3, 2)} ms`;
const bytes = (value) => value === null || value === undefined ? "unknown"
  : value >= 1e9 ? `${digits(value / 1e9, 2)} GB` : value >= 1e5 ? `${digits(value / 1e6, 2)} MB`
  : `${digits(value, 0)} bytes`;
const clock = (unix) => new Date(unix * 1000).toISOString().slice(0, 19).replace("T", " ");
const ratio = (measured, planned) => measured && planned ? `${digits(measured / planned, 2)} ×` : "";

function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = name;
  return made;
}

function mark(index) {
  const made = element("span", "", "mark");
  made.style.background = color(index);
  return made;
}

// Name of a run, with its color.
function label(index) {
  const made = element("span");
  made.append(mark(index), runs[index].facts.name);
  return made;
}

// Fill a table. A row is a list of cells: text, a node, or {number: text}.
function table(id, header, rows) {
  const top = element("tr"), body = document.createElement("tbody"), head = document.createElement("thead");
  top.append(...header.map((text) => element("th", text)));
  head.append(top);
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((cell) => {
      const isNumber = cell !== null && typeof cell === "object" && "number" in cell;
      const made = line.insertCell(), shown = isNumber ? cell.number : cell;
      made.className = isNumber ? "number" : "";
      made.append(shown instanceof Node ? shown : String(shown ?? ""));
    });
  }
  at(id).replaceChildren(...(rows.length ? [head, body] : []));
}

function known() {
  return runs.map((run) => `${run.curves}:${run.sequence}:${run.digest}`).join(",");
}

// Take in what is new of a run.
function take(run, news) {
  if (news.curves !== run.curves) {
    for (const name of run.points.keys()) changed.add(name);
    run.points = new Map();
  }
  Object.assign(run, { curves: news.curves, sequence: news.sequence, width: news.width });
  for (const [name, points] of Object.entries(news.points)) {
    if (!run.points.has(name)) run.points.set(name, new Map());
    for (const point of points) run.points.get(name).set(Math.floor(point[0] / run.width), point);
    changed.add(name);
  }
  if (!news.facts) return false;
  const planned = JSON.stringify(run.facts?.plan);
  Object.assign(run, { digest: news.digest, facts: news.facts });
  if (JSON.stringify(run.facts.plan) !== planned) Object.keys(PLANNED).forEach((name) => changed.add(name));
  return true;
}

function rows(name) {
  const from = Number(at("from").value) || 0, found = [];
  runs.forEach((run, index) => {
    for (const [step, mean, low = mean, high = mean] of run.points.get(name)?.values() ?? [])
      if (step >= from) found.push({ run: String(index), name: run.facts.name, step, value: mean, low, high });
  });
  return found;
}

function plans(name) {
  return runs.flatMap((run, index) => {
    const plan = run.facts?.plan ?? {}, value = isComparable(plan, name) ? plan[PLANNED[name]] : null;
    return typeof value === "number" ? [{ run: String(index), name: `plan of ${run.facts.name}`, value }] : [];
  });
}

// A lower bound is no prediction, and what is measured on a CPU is the memory of the whole process.
function isComparable(plan, name) {
  return name === "memory_bytes" ? !String(plan.target).startsWith("cpu") : plan.is_complete;
}

function spec(name) {
  const order = runs.map((_, index) => String(index));
  const run = { field: "run", type: "nominal", legend: null, scale: { domain: order, range: order.map((_, index) => color(index)) } };
  const x = { field: "step", type: "quantitative", title: null, scale: { zero: false, nice: false }, axis: { tickCount: 5, format: "~s" } };
  const y = { field: "value", type: "quantitative", title: null, scale: { zero: false }, axis: { tickCount: 5, format: "~g" } };
  const tooltip = [{ field: "name", title: "run" }, { field: "step" }, { field: "value", format: ".6~g" },
    { field: "low", format: ".6~g" }, { field: "high", format: ".6~g" }];
  const layer = [
    { data: { name: "rows" }, mark: { type: "area", opacity: 0.2 },
      encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color: run } },
    { data: { name: "rows" }, mark: { type: "line", strokeWidth: 1.5 }, encoding: { x, y, color: run } },
    { data: { name: "rows" }, mark: { type: "circle", size: 14 }, encoding: { x, y, color: run, tooltip } },
  ];
  if (PLANNED[name]) layer.push({
    data: { name: "plans" }, mark: { type: "rule", strokeDash: [5, 4], strokeWidth: 1.5 },
    encoding: { y, color: run, tooltip: [{ field: "name" }, { field: "value", format: ".6~g" }] } });
  return { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", height: 190,
    datasets: { rows: [], plans: [] }, layer,
    config: { view: { stroke: null }, axis: { grid: false, labelFontSize: 11 } } };
}

async function draw(name) {
  if (!charts.has(name)) {
    const made = document.createElement("figure"), caption = element("figcaption"), box = element("div", "", "chart");
    caption.append(element("b", name), ` ${names.metrics[name] ?? ""}`);
    made.append(caption, box);
    made.dataset.metric = name;
    place(made, name);
    const chart = { view: null, figure: made };
    charts.set(name, chart);
    // ast: without eval, which the policy of the page forbids. logLevel: a chart may be empty.
    await vega;
    chart.view = (await vegaEmbed(box, spec(name), { actions: false, renderer: "canvas", ast: true,
      logLevel: 1 })).view;
  }
  const { view } = charts.get(name);
  if (!view) return;  // drawn for the first time now
  view.data("rows", rows(name));
  if (PLANNED[name]) view.data("plans", plans(name));
  await view.runAsync();
}

// Charts of the first metrics are in their order; the others are folded away.
function place(made, name) {
  const rank = FIRST.indexOf(name);
  if (rank < 0) { at("more-charts").append(made); return; }
  const after = [...at("charts").children].find((other) => FIRST.indexOf(other.dataset.metric) > rank);
  at("charts").insertBefore(made, after ?? null);
}

async function drawChanged() {
  const isShown = (name) => FIRST.includes(name) || at("more").open;
  for (const name of [...changed].filter(isShown)) {
    changed.delete(name);
    await draw(name);
  }
}

function showRuns() {
  const now = Date.now() / 1000;
  table("runs", ["run", "state", "step", "loss", "validation loss", "tokens/s", "time left", "last record", "directory"],
    runs.map(({ facts }, index) => {
      const { latest, plan, measured } = facts, left = (plan.steps ?? facts.step) - facts.step;
      const isLate = facts.is_training && facts.grew_at;
      return [label(index), facts.state, { number: `${facts.step}${plan.steps ? ` of ${plan.steps}` : ""}` },
        { number: figure(latest.loss) }, { number: figure(latest.validation_loss) },
        { number: latest.tokens_per_second ? digits(latest.tokens_per_second, 0) : "" },
        { number: facts.is_training && left > 0 && measured.step_seconds ? seconds(left * measured.step_seconds) : "" },
        { number: isLate ? `${seconds(Math.max(0, now - facts.grew_at))} ago` : "" }, facts.directory];
    }));
}

function showProblems() {
  const said = runs.flatMap(({ facts }) => [
    ...facts.problems,
    ...Object.entries(facts.not_finite).filter(([, count]) => count).map(([name, count]) => `${name} is not finite in ${count} records`),
    ...(facts.plan.problem ? [facts.plan.problem] : []),
  ].map((text) => `${facts.name}: ${text}`));
  at("problems").replaceChildren(...said.map((text) => element("li", text, "problem")));
}

function showPlan() {
  table("plan", ["run", "machine", "step time: plan", "measured", "", "memory: plan", "measured", "", "source of the plan"],
    runs.map(({ facts }, index) => {
      const { plan, measured } = facts, bound = plan.is_complete === false && plan.seconds !== null ? "at least " : "";
      const unknown = plan.unknown ?? plan.problem;
      return [label(index), plan.target ?? "", { number: bound + seconds(plan.seconds) }, { number: seconds(measured.step_seconds) },
        { number: ratio(measured.step_seconds, plan.seconds) }, { number: bytes(plan.peak_bytes) },
        { number: bytes(measured.memory_bytes) }, { number: isComparable(plan, "memory_bytes") ? ratio(measured.memory_bytes, plan.peak_bytes) : "" },
        unknown ? `unknown: ${unknown}` : plan.source === "compiler" ? "compiled program" : "estimate"];
    }));
}

function showGoodput() {
  const parts = runs.map(({ facts }, index) => {
    const made = element("div"), { goodput } = facts;
    made.append(label(index));
    if (goodput.problem) { made.append(`: ${goodput.problem}`); return made; }
    made.append(`: ${digits(goodput.goodput * 100)} % of ${seconds(goodput.wall_seconds)}, in ${goodput.starts} ` +
      `${goodput.starts === 1 ? "start" : "starts"}, ${goodput.wasted_steps} wasted steps`);
    const bar = element("div", "", "bar"), list = [];
    for (const [bucket, spent] of Object.entries(goodput.seconds)) {
      if (!spent) continue;
      const piece = element("span"), said = `${bucket} ${seconds(spent)} (${digits(spent / goodput.wall_seconds * 100)} %)`;
      piece.style.background = names.colors[bucket] ?? "#000";
      piece.style.flex = String(spent);
      piece.title = `${said}: ${names.buckets[bucket] ?? ""}`;
      bar.append(piece);
      list.push(said);
    }
    made.append(bar, element("small", list.join(" · ")));
    return made;
  });
  at("goodput").replaceChildren(...parts);
  table("starts", ["run", "start (UTC)", "host", "seconds", "steps", "wasted", "end"],
    runs.flatMap(({ facts }, index) => (facts.goodput.processes ?? []).slice(-10).map((one, number, all) => [
      label(index), clock(one.started_at), one.host, { number: digits(one.seconds) },
      one.last_step === null ? "none" : `${(one.first_step ?? 0) + 1}-${one.last_step}`, { number: String(one.wasted_steps) },
      facts.is_training && number === all.length - 1 ? "running" : one.outcome])));
}

function showCheckpoints() {
  table("checkpoints", ["run", "step", "saved (UTC)", "size", "validation loss", "status"],
    runs.flatMap(({ facts }, index) => {
      const { checkpoints } = facts;
      const found = (checkpoints.rows ?? []).map((one) => [label(index), { number: String(one.step) }, clock(one.saved_at),
        { number: bytes(one.nbytes) }, { number: figure(one.validation_loss) },
        one.status === "complete" ? "whole" : one.reason ? `${one.status}: ${one.reason}` : one.status]);
      const begun = (checkpoints.unfinished ?? []).map((step) =>
        [label(index), { number: String(step) }, "", "", "", facts.is_training ? "being saved" : "not completed"]);
      if (checkpoints.problem) begun.push([label(index), "", "", "", "", checkpoints.problem]);
      return [...found, ...begun];
    }));
}

function showSpikes() {
  const all = runs.flatMap(({ facts }, index) => facts.spikes.map((one) => [label(index), { number: String(one.step) }, one.on_spike,
    { number: one.loss === null ? "not finite" : figure(one.loss) }, { number: figure(one.loss_limit) },
    { number: one.grad_norm === null ? "not finite" : figure(one.grad_norm) }, { number: figure(one.grad_norm_limit) },
    { number: String(one.documents) }, { number: one.checkpoint === null ? "" : String(one.checkpoint) }]));
  at("spikes-section").hidden = !all.length;
  table("spikes", ["run", "step", "on_spike", "loss", "limit", "gradient norm", "limit", "documents", "rewound to"], all);
}

function showSamples() {
  const steps = [...new Set(runs.flatMap(({ facts }) => facts.samples.map((one) => one.step)))].sort((a, b) => b - a);
  const chosen = at("sample-step"), before = chosen.value, wasLast = chosen.selectedIndex <= 0;
  chosen.replaceChildren(...steps.map((step) => new Option(String(step))));
  if (!wasLast && steps.includes(Number(before))) chosen.value = before;
  at("samples-section").hidden = !steps.length;
  showSamplesOf();
}

function showSamplesOf() {
  const step = Number(at("sample-step").value);
  at("samples").replaceChildren(...runs.flatMap(({ facts }, index) => facts.samples.filter((one) => one.step === step).map((one) => {
    const made = element("div"), box = element("pre");
    box.append(element("span", one.prompt, "prompt"), one.text);
    made.append(label(index), box);
    return made;
  })));
}

function show() {
  for (const part of [showRuns, showProblems, showPlan, showGoodput, showCheckpoints, showSpikes, showSamples]) part();
}

async function ask() {
  const response = await fetch(`data?known=${encodeURIComponent(known())}`, { cache: "no-store" });
  if (!response.ok) throw new Error(`status ${response.status}`);
  const answers = (await response.json()).runs;
  if (answers.length !== runs.length) {  // the first time, or the server was started for other runs
    runs.splice(0, runs.length, ...answers.map(() => ({ curves: "", sequence: 0, digest: "", points: new Map() })));
    if (answers.some((one) => !one.facts)) return true;
  }
  const isNew = answers.map((news, index) => take(runs[index], news)).some(Boolean);
  if (isNew) show(); else showRuns();
  await drawChanged();
  return answers.some((news) => news.is_behind);
}

async function follow() {
  let pause = SECOND;
  if (!document.hidden) {
    try {
      pause = (await ask()) ? 0 : SECOND;
      at("server").textContent = "";
      document.body.dataset.drawn = "yes";
    } catch (error) {
      at("server").textContent = `graphtrain watch does not answer (${error.message}): what is shown is not new`;
      pause = LATER * SECOND;
    }
  }
  setTimeout(follow, pause);
}

at("from").addEventListener("change", () => { for (const name of charts.keys()) changed.add(name); drawChanged(); });
at("more").addEventListener("toggle", drawChanged);
at("sample-step").addEventListener("change", showSamplesOf);
document.addEventListener("visibilitychange", () => { if (!document.hidden) showRuns(); });

fetch("names").then((response) => response.json()).then((found) => { names = found; }).finally(follow);
