"use strict";
// Script of a plan's page: reads the embedded JSON and draws charts with Vega-Lite, offline.

const plan = JSON.parse(document.getElementById("plan").textContent);
const at = (id) => document.getElementById(id);
const ALL_KINDS = {
  parameters: "#2f6fb5", frozen: "#1f4a77", optimizer: "#7fb2e5", gradients: "#5aa469",
  activations: "#e0a33e", temporaries: "#b9bfc7",
};
const KINDS = Object.keys(ALL_KINDS).filter((kind) => kind !== "frozen" || plan.memory.frozen_bytes);
const COLORS = KINDS.map((kind) => ALL_KINDS[kind]);
const CONFIG = {
  view: { stroke: null },
  font: "system-ui, Segoe UI, Roboto, sans-serif",
  axis: { labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, grid: false },
  legend: { labelFontSize: 12, titleFontSize: 12 },
};
const DEVICES_SHOWN = 1024;

const number = (value, digits = 1) =>
  value.toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const mega = (bytes) => number(bytes / 1e6);
const megabytes = (bytes) =>
  bytes >= 1e9 ? `${number(bytes / 1e9, 2)} GB` : bytes >= 1e5 || bytes === 0 ? `${mega(bytes)} MB` : `${bytes.toLocaleString("en-US")} bytes`;
const seconds = (value) =>
  value === null || value === undefined ? "unknown"
    : value === 0 ? "0 s"
    : value >= 1 ? `${number(value, 2)} s` : value >= 1e-3 ? `${number(value * 1e3, 2)} ms`
    : `${number(value * 1e6, 1)} µs`;
const flops = (value) => {
  const units = ["", "k", "M", "G", "T", "P", "E"];
  const power = value > 0 ? Math.min(units.length - 1, Math.floor(Math.log10(value) / 3)) : 0;
  return `${number(value / 1000 ** power, power ? 2 : 0)} ${units[power]}FLOP`;
};
const source = (name) => {
  const mark = document.createElement("span");
  mark.className = `source ${name.split(" ")[0]}`;
  mark.textContent = name;
  return mark;
};

function draw(id, spec) {
  const whole = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", config: CONFIG, ...spec };
  return vegaEmbed(at(id), whole, { actions: false, renderer: "svg" }).then((result) => result.view);
}

// Fill a table that can be sorted by its headers. Column: {name, of: row => value, show?, number?, words?}.
function table(id, columns, rows) {
  const head = document.createElement("tr"), body = document.createElement("tbody");
  const fill = (sorted) => body.replaceChildren(...sorted.map((row) => line(columns, row)));
  columns.forEach((column) => {
    const cell = document.createElement("th"), button = document.createElement("button");
    button.textContent = column.name;
    cell.append(button);
    if (column.number) cell.className = "number";
    button.addEventListener("click", () => {
      const down = cell.ariaSort ? cell.ariaSort === "ascending" : Boolean(column.number);
      for (const other of head.children) other.removeAttribute("aria-sort");
      cell.ariaSort = down ? "descending" : "ascending";
      const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
      fill([...rows].sort((a, b) => order(column.of(a), column.of(b)) * (down ? -1 : 1)));
    });
    head.append(cell);
  });
  const top = document.createElement("thead");
  top.append(head);
  fill(rows);
  at(id).replaceChildren(top, body);
}

function line(columns, row) {
  const tr = document.createElement("tr");
  for (const column of columns) {
    const td = tr.insertCell(), shown = (column.show ?? column.of)(row);
    td.className = column.number ? "number" : column.words ? "words" : "";
    td.append(shown instanceof Node ? shown : String(shown));
  }
  return tr;
}

function header() {
  const mesh = Object.entries(plan.mesh).filter(([, size]) => size > 1);
  const axes = mesh.map(([name, size]) => `${name} ${size}`).join(" × ") || "1 device";
  const devices = plan.devices === 1 ? "1 device" : `${plan.devices} devices`;
  at("about").textContent =
    `${plan.target} · ${devices} · mesh ${axes} · rules ${plan.rules.join(", ")}`;
  const command = plan.command ? [", made by ", code(plan.command)] : [];
  at("made").replaceChildren(`graphtrain ${plan.version}, ${plan.date}`, ...command);
  at("findings-section").hidden = !plan.findings.length;
  at("findings").replaceChildren(...plan.findings.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
  table("settings", [
    { name: "setting", of: ([name]) => name, show: ([name]) => code(name) },
    { name: "value", of: ([, value]) => value, show: ([, value]) => code(value), words: true },
  ], Object.entries(plan.settings));
  at("verdict").textContent = plan.verdict;
  at("verdict").className = plan.fits ? "fits" : "over";
  at("remark").textContent = plan.remark;
  at("remark").hidden = !plan.remark;
}

function figures() {
  const sent = plan.collectives.reduce((sum, one) => sum + one.wire_bytes_per_step, 0);
  const share = (plan.memory.peak_bytes / plan.memory.capacity_bytes) * 100;
  const all = [
    ["peak memory per device", megabytes(plan.memory.peak_bytes), plan.memory.source],
    ["of the usable memory", share < 0.1 ? "under\u00a00.1\u00a0%" : `${number(share)} %`, plan.memory.source],
    ["sent per device and step", megabytes(sent), plan.sources.collectives],
    ["step time" + (plan.step_seconds_is_lower_bound ? ", at least" : ""), seconds(plan.step_seconds), plan.measured ? "profile" : "estimate"],
    ["parameters", plan.parameter_count.toLocaleString("en-US"), "rules"],
  ];
  if (plan.frozen_parameter_count)
    all.push(["frozen parameters", plan.frozen_parameter_count.toLocaleString("en-US"), "rules"]);
  // Of a machine whose speeds are not all known, the utilization is not known either.
  if (plan.mfu !== null)
    all.push(["model FLOPs utilization", `${number(plan.mfu * 100)} %`, "estimate"]);
  if (plan.compile_seconds !== null)
    all.push(["compile time", seconds(plan.compile_seconds), "compiler"]);
  for (const [name, value, who] of all) {
    const box = document.createElement("div"), text = document.createElement("span");
    const bold = document.createElement("b");
    box.className = "figure";
    bold.textContent = value;
    text.textContent = `${name} `;
    box.append(bold, text, source(who));
    at("figures").append(box);
  }
}

// Return the coordinates of a device on the mesh; ids increase along the last axis first.
function coordinates(device) {
  const found = {};
  for (const [axis, size] of Object.entries(plan.mesh).reverse()) {
    found[axis] = device % size;
    device = Math.floor(device / size);
  }
  return found;
}

// Return the index of a device's shard along each dimension of an array.
function piece(array, place) {
  return array.split.map((axes) =>
    axes.reduce((index, axis) => index * plan.mesh[axis] + place[axis], 0));
}

// Divide the mesh axes into those of the rows and of the columns, so that the grid is nearly square.
function gridAxes() {
  const axes = Object.keys(plan.mesh).filter((axis) => plan.mesh[axis] > 1);
  const size = (names) => names.reduce((n, axis) => n * plan.mesh[axis], 1);
  let best = 0;
  for (let cut = axes.length > 1 ? 1 : 0; cut < axes.length; cut++) {
    const uneven = (at) => Math.abs(Math.log(size(axes.slice(0, at)) / size(axes.slice(at))));
    if (!best || uneven(cut) <= uneven(best)) best = cut;
  }
  const rows = axes.slice(0, best), columns = axes.slice(best);
  return { columns, rows, width: size(columns) };
}

function devices(array) {
  const { rows, columns, width } = gridAxes();
  const pieces = array.split.map((axes) => axes.reduce((n, axis) => n * plan.mesh[axis], 1));
  return Array.from({ length: Math.min(plan.devices, DEVICES_SHOWN) }, (_, device) => {
    const place = coordinates(device), held = piece(array, place);
    const ranges = held.map((index, d) => {
      const size = array.shape[d] / pieces[d];
      return pieces[d] > 1 ? `${index * size}:${(index + 1) * size}` : ":";
    });
    return {
      device,
      row: rows.map((axis) => place[axis]).join(", "),
      column: columns.map((axis) => place[axis]).join(", "),
      shard: held.reduce((flat, index, d) => flat * pieces[d] + index, 0),
      holds: ranges.length ? `[${ranges.join(", ")}]` : "the scalar",
      on: Object.keys(place).filter((axis) => plan.mesh[axis] > 1)
        .map((axis) => `${axis} ${place[axis]}`).join(", ") || "the device",
    };
  });
}

function describe(array) {
  const pieces = array.split.flat().reduce((n, axis) => n * plan.mesh[axis], 1);
  const dimensions = array.shape.map((size, d) => {
    const name = array.axes[d] ?? "–", split = array.split[d];
    return `${name} ${size}${split.length ? ` over ${split.join("+")}` : ""}`;
  });
  const copies = plan.devices / pieces;
  at("array-about").textContent =
    `${array.dtype} · ${dimensions.join(" × ") || "scalar"} · ${pieces} ` +
    `${pieces === 1 ? "shard" : "different shards"} of ${array.shard_shape.join("×") || "1"} ` +
    `(${megabytes(array.bytes)}), each on ${copies} ${copies === 1 ? "device" : "devices"}`;
}

// Draw a grid of the devices, each with the number and color of its shard.
function drawDevices(array) {
  const { columns, rows, width } = gridAxes();
  const shown = devices(array), height = Math.ceil(shown.length / width);
  const cell = Math.max(12, Math.min(56, Math.floor(960 / width)));
  const pieces = 1 + Math.max(...shown.map((one) => one.shard));
  const hover = { type: "point", on: "mouseover", clear: "mouseout", fields: ["shard"] };
  const title = (axes) => axes.map((axis) => `${axis} ${plan.mesh[axis]}`).join(" × ") || null;
  const few = { type: "nominal", scale: { scheme: "tableau10" } };
  const many = { type: "quantitative", scale: { scheme: { name: "viridis", extent: [0, 0.8] } } };
  const layers = [{
    params: [{ name: "same", select: hover }],
    mark: { type: "rect", stroke: "#fff", strokeWidth: 2, cornerRadius: 3 },
    encoding: {
      color: { field: "shard", legend: null, ...(pieces > 10 ? many : few) },
      opacity: { condition: { param: "same", value: 1 }, value: 0.25 },
      tooltip: [{ field: "device" }, { field: "on", title: "mesh coordinates" },
        { field: "shard", title: "shard" }, { field: "holds", title: "indices" }],
    },
  }];
  if (cell >= 24) layers.push({
    mark: { type: "text", fontSize: Math.min(14, cell / 2.6), fontWeight: 600, color: "#fff", tooltip: false },
    encoding: { text: { field: "shard" } },
  });
  return draw("devices-chart", {
    width: cell * width, height: cell * height, data: { values: shown }, layer: layers,
    encoding: {
      x: { field: "column", type: "ordinal", title: title(columns),
        sort: null, axis: columns.length ? { labelAngle: 0, orient: "top", labels: width <= 16, ticks: false, domain: false } : null },
      y: { field: "row", type: "ordinal", title: title(rows), sort: null,
        axis: rows.length ? { ticks: false, domain: false } : null },
    },
  });
}

// List all arrays with the split of each dimension; moments only if asked for.
function arrayTable() {
  const split = (array) => {
    const text = document.createElement("span");
    array.shape.forEach((size, d) => {
      const axes = array.split[d], part = document.createElement("span");
      part.className = axes.length ? "split" : "whole";
      part.textContent = `${array.axes[d] ?? "–"} ${size}${axes.length ? ` over ${axes.join(" + ")}` : ""}`;
      text.append(d ? " × " : "", part);
    });
    return array.shape.length ? text : "scalar";
  };
  const shards = (array) => array.split.flat().reduce((n, axis) => n * plan.mesh[axis], 1);
  const rows = plan.arrays.filter((one) => at("with-optimizer").checked || one.role !== "optimizer");
  table("arrays", [
    { name: "array", of: (one) => one.path, show: (one) => code(one.path.replace(/^state\//, "")) },
    { name: "dimensions and split", of: (one) => one.split.flat().join(), show: split, words: true },
    { name: "shards", of: shards, number: true },
    { name: "bytes per device", of: (one) => one.bytes, show: (one) => megabytes(one.bytes), number: true },
  ], rows);
}

async function arrays() {
  at("with-optimizer").addEventListener("change", arrayTable);
  arrayTable();
  const select = at("array");
  for (const array of plan.arrays) select.add(new Option(array.path, array.path));
  const largest = plan.arrays.reduce((a, b) => (b.role === "parameter" && b.bytes > a.bytes ? b : a),
    plan.arrays.find((one) => one.role === "parameter") ?? plan.arrays[0]);
  select.value = largest.path;
  await drawDevices(largest);
  const left = plan.devices > DEVICES_SHOWN ? ` Only the first ${DEVICES_SHOWN} devices are shown.` : "";
  at("devices-note").textContent =
    `Each square is a device; its number and color identify its shard.${left} ` +
    "Hover over a device to highlight all devices with the same shard.";
  describe(largest);
  select.addEventListener("change", () => {
    const array = plan.arrays.find((one) => one.path === select.value);
    describe(array);
    drawDevices(array);
  });
}

async function memory() {
  const { memory } = plan, rows = KINDS.map((kind, order) => ({
    kind, order, megabytes: memory[`${kind}_bytes`] / 1e6, says: plan.sources.memory[kind] }));
  const capacity = memory.capacity_bytes / 1e6, peak = memory.peak_bytes / 1e6;
  const spec = (scale) => ({
    width: "container", height: 64,
    layer: [
      { data: { values: rows }, mark: { type: "bar", height: 44 },
        encoding: {
          x: { field: "megabytes", type: "quantitative", stack: "zero", title: "MB",
            scale: { domainMin: 0, ...(scale === "device" ? { domainMax: Math.max(capacity, peak) * 1.02 } : {}) } },
          color: { field: "kind", type: "nominal", title: null, sort: KINDS,
            scale: { domain: KINDS, range: COLORS }, legend: { orient: "top" } },
          order: { field: "order" },
          tooltip: [{ field: "kind" }, { field: "megabytes", format: ",.1f", title: "MB" }, { field: "says", title: "source" }],
        } },
      ...(scale === "device" || peak > capacity ? [{
        data: { values: [{ capacity }] }, mark: { type: "rule", color: "#a02518", strokeWidth: 2 },
        encoding: { x: { field: "capacity", type: "quantitative" },
          tooltip: [{ field: "capacity", format: ",.1f", title: "usable MB of the device" }] } }] : []),
    ],
  });
  for (const radio of document.getElementsByName("scale"))
    radio.addEventListener("change", () => draw("memory-chart", spec(radio.value)));
  const all = [...KINDS, "peak"].map((kind) => ({ kind, bytes: memory[`${kind}_bytes`] }));
  all.push({ kind: "usable", bytes: memory.capacity_bytes });
  table("memory", [
    { name: "kind", of: (row) => row.kind },
    { name: "MB", of: (row) => row.bytes, show: (row) => mega(row.bytes), number: true },
    { name: "% of usable", of: (row) => row.bytes, number: true,
      show: (row) => number((row.bytes / memory.capacity_bytes) * 100) },
    { name: "source", of: (row) => plan.sources.memory[row.kind] ?? plan.capacity_source,
      show: (row) => source(plan.sources.memory[row.kind] ?? plan.capacity_source) },
  ], all);
  await draw("memory-chart", spec("program"));
}

async function time() {
  const parts = plan.step_seconds_by_part;
  const measured = plan.measured;
  const names_of_parts = measured
    ? { compute: "products", memory: "loops between products", starting: "starting operations" }
    : { compute: "compute", memory: "memory" };
  at("time-roofline").hidden = Boolean(measured);
  at("time-profile").hidden = !measured && !plan.profile_note;
  at("time-profile").textContent = measured
    ? "The work of each instruction of the compiled program, by the measured speed of this machine " +
      `(${measured.source}). The step time is the sum of its parts by the clock. All devices together take ` +
      `${seconds(measured.total.processor)} of processor time.`
    : plan.profile_note && `No profile of this machine was used: ${plan.profile_note}.`;
  const rows = Object.entries(names_of_parts).map(
    ([part, name]) => ({ part: name, seconds: parts[part], role: "counts" }));
  for (const [axes, spent] of Object.entries(parts.communication))
    rows.push({ part: `communication over ${axes}`, seconds: spent, role: "sending" });
  if (parts.overlapped) rows.push({ part: "overlapped with compute", seconds: parts.overlapped, role: "hidden" });
  if (parts.bubble) rows.push({ part: "pipeline bubble", seconds: parts.bubble, role: "waiting" });
  rows.push({ part: plan.step_seconds_is_lower_bound ? "step, at least" : "step", seconds: plan.step_seconds, role: "step" });
  const unknown = rows.filter((row) => row.seconds === null).map((row) => row.part);
  at("time-unknown").textContent = unknown.length
    ? `Unknown, because the speeds of ${plan.target} are not known: ${unknown.join(", ")}.` : "";
  for (const row of rows) row.shown = seconds(row.seconds);
  const roles = ["counts", "sending", "waiting", "hidden", "step"];
  const y = { field: "part", type: "nominal", sort: null, title: null, axis: { labelLimit: 220 } };
  const most = Math.max(...rows.map((row) => row.seconds ?? 0));
  const x = { field: "seconds", type: "quantitative", title: measured ? "seconds by the clock (profile)" : "seconds (estimate)",
    axis: { tickCount: 8 }, scale: { domain: [0, most * 1.2 || 1], nice: false } };  // room for the numbers
  await draw("time-chart", {
    width: "container", height: 26 * rows.length, data: { values: rows }, encoding: { y, x },
    layer: [
      { mark: { type: "bar", height: 18 }, encoding: {
        color: { field: "role", type: "nominal", legend: null,
          scale: { domain: roles, range: ["#2f6fb5", "#e0a33e", "#c8574b", "#ccd2d9", "#1d2733"] } },
        tooltip: [{ field: "part" }, { field: "shown", title: "time" }, { field: "role" }] } },
      { mark: { type: "text", align: "left", dx: 5, color: "#1d2733" }, encoding: { text: { field: "shown" } } },
    ],
  });
  const names = { compile_seconds: "compile time", step_seconds: "step time", peak_bytes: "peak memory" };
  const bars = Object.entries(plan.error_bars).map(([name, bar]) =>
    `measured ${names[name]} was ${number(bar.median, 2)} × the prediction (median), ` +
    `${number(bar.worst, 2)} × in the worst case (runs: ${bar.count})`);
  at("error-bars").textContent = bars.length
    ? `Error bar on ${plan.target}: ${bars.join("; ")}.`
    : `No error bar yet: each run on ${plan.target} adds a measurement.`;
}

// Show FLOPs and roofline times of each part of the model, as a chart and as a table.
async function parts() {
  const list = plan.rooflines;
  const repeats = (one) => one.replicas > 1 ? `${one.replicas} × over ${one.replicated_over.join(" + ")}` : "once";
  table("parts", [
    { name: "part", of: (one) => one.part },
    { name: "model, all devices", of: (one) => one.model_flops, show: (one) => flops(one.model_flops), number: true },
    { name: "recomputed", of: (one) => one.recomputed_flops, show: (one) => flops(one.recomputed_flops), number: true },
    { name: "computed", of: (one) => one.replicas, show: repeats },
    { name: "on a device", of: (one) => one.device_flops, show: (one) => flops(one.device_flops), number: true },
    { name: "at peak", of: (one) => one.compute_seconds, show: (one) => seconds(one.compute_seconds), number: true },
    { name: "weights read", of: (one) => one.weight_bytes, show: (one) => megabytes(one.weight_bytes), number: true },
    { name: "at bandwidth", of: (one) => one.weight_seconds, show: (one) => seconds(one.weight_seconds), number: true },
  ], list);
  const rows = list.map((one) => ({ part: one.part, gigaflops: one.device_flops / 1e9, shown: flops(one.device_flops), computed: repeats(one) }));
  const most = Math.max(...rows.map((row) => row.gigaflops));
  await draw("parts-chart", {
    width: "container", height: 26 * rows.length, data: { values: rows },
    encoding: {
      y: { field: "part", type: "nominal", sort: null, title: null, axis: { labelLimit: 220 } },
      x: { field: "gigaflops", type: "quantitative", title: "GFLOP of a device in a step (estimate)",
        axis: { tickCount: 8 }, scale: { domain: [0, most * 1.3 || 1], nice: false } },
    },
    layer: [
      { mark: { type: "bar", height: 18, color: "#2f6fb5" }, encoding: {
        tooltip: [{ field: "part" }, { field: "shown", title: "FLOP" }, { field: "computed" }] } },
      { mark: { type: "text", align: "left", dx: 5, color: "#1d2733" }, encoding: { text: { field: "shown" } } },
    ],
  });
}

async function pipeline() {
  const pipe = plan.pipeline;
  if (!pipe) return;
  at("pipeline-section").hidden = false;
  at("pipeline-about").textContent =
    `${pipe.schedule}: ${pipe.stages} stages, ${pipe.rounds} ` +
    `${pipe.rounds === 1 ? "round" : "rounds"}, ${pipe.microbatches} microbatches; each stage ` +
    `is idle for ${number(pipe.bubble * 100)} % of a step, if all ticks take the same time. ` +
    `Numbers are microbatches${pipe.rounds > 1 ? "; lighter colors are later rounds" : ""}.`;
  const rows = pipe.work.map(([stage, tick, kind, microbatch, round]) =>
    ({ stage, tick, until: tick + 1, kind, microbatch, round }));
  const ticks = Math.max(...rows.map((row) => row.until));
  const room = at("pipeline-chart").clientWidth - 70;
  const wide = Math.max(room, Math.min(4000, ticks * 14));
  const layers = [{
    mark: { type: "rect", stroke: "#fff", strokeWidth: 1 },
    encoding: {
      color: { field: "kind", type: "nominal", title: null, legend: { orient: "top" },
        scale: { domain: ["forward", "backward"], range: ["#2f6fb5", "#5aa469"] } },
      opacity: { field: "round", type: "ordinal", legend: null, scale: { range: [0.95, 0.55] } },
      tooltip: ["stage", "kind", "microbatch", "round"].map((field) => ({ field })),
    },
  }];
  if (wide / ticks >= 14) layers.push({
    transform: [{ calculate: "(datum.tick + datum.until) / 2", as: "middle" }],
    mark: { type: "text", color: "#fff", fontSize: 11, tooltip: false },
    encoding: { x: { field: "middle", type: "quantitative" }, x2: null, text: { field: "microbatch" } },
  });
  await draw("pipeline-chart", {
    width: wide, height: { step: 30 }, data: { values: rows },
    encoding: {
      x: { field: "tick", type: "quantitative", title: "tick", axis: { tickMinStep: 1 },
        scale: { domain: [0, ticks], nice: false } },
      x2: { field: "until" },
      y: { field: "stage", type: "ordinal", title: "stage" },
    },
    layer: layers,
  });
}

async function collectives() {
  const list = [...plan.collectives].sort((a, b) => b.wire_bytes_per_step - a.wire_bytes_per_step);
  const who = plan.sources.collectives;
  const about = list.length
    ? `${list.reduce((sum, one) => sum + one.count, 0).toLocaleString("en-US")} per step, including repetitions in loops `
    : "None: the devices of this plan do not communicate. ";
  at("collectives-about").replaceChildren(about, source(who));
  if (!list.length) return;
  table("collectives", [
    { name: "mesh axes", of: (one) => one.axes.join("+") },
    { name: "operation", of: (one) => one.op },
    { name: "per step", of: (one) => one.count, number: true, show: (one) => one.count.toLocaleString("en-US") },
    { name: "unsharded size", of: (one) => one.bytes, number: true, show: (one) => megabytes(one.bytes) },
    { name: "sent", of: (one) => one.wire_bytes_per_step, number: true, show: (one) => megabytes(one.wire_bytes_per_step) },
    ...(list.some((one) => one.why) ? [{ name: "why", of: (one) => one.why, words: true }] : []),
  ], list);
  const sums = new Map();
  for (const one of list) {
    const key = `${one.axes.join("+")}|${one.op}`;
    sums.set(key, (sums.get(key) ?? 0) + one.wire_bytes_per_step / 1e6);
  }
  const rows = [...sums].map(([key, sent]) => ({ over: key.split("|")[0], operation: key.split("|")[1], sent }));
  await draw("collectives-chart", {
    width: "container", height: 30 * new Set(rows.map((row) => row.over)).size, data: { values: rows }, mark: { type: "bar", height: 20 },
    encoding: {
      y: { field: "over", type: "nominal", title: "mesh axes", sort: "-x" },
      x: { field: "sent", type: "quantitative", title: `MB sent per device and step (${who})`, stack: "zero" },
      color: { field: "operation", type: "nominal", title: null, scale: { scheme: "tableau10" }, legend: { orient: "top" } },
      tooltip: [{ field: "over", title: "mesh axes" }, { field: "operation" }, { field: "sent", format: ",.1f", title: "MB" }],
    },
  });
}

function code(text) {
  const element = document.createElement("code");
  element.textContent = text;
  return element;
}

function remedies() {
  at("remedies-section").hidden = !plan.remedies.length;
  table("remedies", [
    { name: "change", of: (one) => one.change.join(" "), show: (one) => code(one.change.map((set) => `--set '${set}'`).join(" ")) },
    { name: "peak MB", of: (one) => one.peak_bytes, show: (one) => mega(one.peak_bytes), number: true },
    { name: "step", of: (one) => one.step_seconds, show: (one) => seconds(one.step_seconds), number: true },
    { name: "device-seconds", of: (one) => one.device_seconds, show: (one) => number(one.device_seconds, 2), number: true },
    { name: "source", of: (one) => one.confirmed, show: (one) => source(one.confirmed ? "compiler" : "estimate") },
  ], plan.remedies);
}

function causes() {
  const found = plan.collectives.filter((one) => one.explained === false && one.significant);
  at("causes-section").hidden = !found.length;
  table("causes", [
    { name: "cause and remedy", of: (one) => one.why, words: true },
    { name: "mesh axes", of: (one) => one.axes.join("+") },
    { name: "operation", of: (one) => one.op },
    { name: "sent per device and step", of: (one) => one.wire_bytes_per_step, number: true, show: (one) => megabytes(one.wire_bytes_per_step) },
  ], found);
}

// Format a setting: sizes of a mesh or a pipeline, names of rules.
function words(value) {
  if (value === null || value === undefined) return "unknown";
  if (Array.isArray(value)) return value.join(", ");
  if (value && typeof value === "object")
    return Object.entries(value).map(([name, size]) => `${name} ${size}`).join(" × ") || "1 device";
  return String(value ?? "");
}

// Show strategies in the format of `graphtrain plan search --json`, with one column per key.
async function search() {
  const list = plan.search;
  if (!list.length) return;
  at("search-section").hidden = false;
  const names = [...new Set(list.flatMap(Object.keys))];
  const text = (value, name) => typeof value !== "number" ? words(value)
    : name.endsWith("_bytes") ? megabytes(value) : name.endsWith("seconds") ? seconds(value)
    : name === "mfu" ? `${number(value * 100)} %` : value.toLocaleString("en-US");
  const column = (name) => ({
    name: name === "mfu" ? "MFU" : name.replaceAll("_", " ").replace(/ (bytes|seconds)$/, ""),
    number: list.some((one) => typeof one[name] === "number"),
    of: (one) => typeof one[name] === "number" ? one[name] : words(one[name]),
    show: (one) => name === "source" ? source(one[name]) : text(one[name], name),
  });
  table("search", names.map(column), list);
  if (!list.every((one) => one.step_seconds && one.peak_bytes)) return;
  const capacity = plan.memory.capacity_bytes / 1e9;
  const rows = list.map((one) => ({
    gigabytes: one.peak_bytes / 1e9, step_seconds: one.step_seconds,
    ...Object.fromEntries(names.map((name) => [column(name).name, text(one[name], name)])),
  }));
  await draw("search-chart", {
    width: "container", height: 260,
    layer: [
      { data: { values: rows }, mark: { type: "point", filled: true, size: 70, color: "#2f6fb5", opacity: 0.7 },
        encoding: {
          x: { field: "step_seconds", type: "quantitative", title: "seconds per step (estimate)", scale: { zero: false } },
          y: { field: "gigabytes", type: "quantitative", title: "peak GB per device" },
          tooltip: names.map((name) => ({ field: column(name).name })) } },
      { data: { values: [{ capacity }] }, mark: { type: "rule", color: "#a02518", strokeDash: [4, 4] },
        encoding: { y: { field: "capacity", type: "quantitative" } } },
    ],
  });
}

header();
figures();
remedies();
causes();
Promise.all([arrays(), memory(), time(), parts(), pipeline(), collectives(), search()])
  .then(() => document.body.dataset.drawn = "yes");
