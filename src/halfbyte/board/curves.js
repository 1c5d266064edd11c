// A common cursor over all curves of a page, with the values below it, and zoom by dragging. A double click zooms out.
// Values are read from the paths, which have two decimals of a drawing of some 200 units.
const LEFT = 52; // the margins of a drawing, as in curves.py
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 34;
const COLUMN = 0.6; // units of a drawing: half the column of the screen that a long curve is reduced to
const FAR = 4; // units of a drawing beyond which a value is shown with its own place
const SHORTEST = 5; // units of a drag that zooms
const SVG = "http://www.w3.org/2000/svg";
const points = new WeakMap();
let pointer = null; // the last position, for pages that are drawn again
let keyed = null; // the value at which the keys have put the cursor
let begin = null; // where a drag began: the chart and its x
let zoom = () => {};

export function onZoom(handler) {
  zoom = handler;
}

const chartOf = (target) => (target instanceof Element ? target.closest("svg.chart[data-x]") : null);
const numbers = (text) => text.split(" ").map(Number);

function scale(chart) {
  const { width, height } = chart.viewBox.baseVal;
  const [low, high] = numbers(chart.dataset.x);
  const [bottom, top] = numbers(chart.dataset.y);
  const across = width - LEFT - RIGHT;
  const up = height - TOP - BOTTOM;
  return {
    width,
    height,
    low,
    high,
    span: top - bottom,
    x: (value) => LEFT + (across * (value - low)) / (high - low),
    valueOfX: (x) => low + ((high - low) * (x - LEFT)) / across,
    valueOfY: (y) => bottom + ((top - bottom) * (height - BOTTOM - y)) / up,
  };
}

function unitsOf(chart, event) {
  const box = chart.getBoundingClientRect();
  const { width } = chart.viewBox.baseVal;
  return Math.min(Math.max(((event.clientX - box.left) / box.width) * width, LEFT), width - RIGHT);
}

function pointsOf(path) {
  if (!points.has(path)) {
    const pairs = path.getAttribute("d").split(/[ML]/).slice(1);
    points.set(path, pairs.map(numbers));
  }
  return points.get(path);
}

// Return the point next to x; of reduced curves the lowest and the highest point of its column of the screen.
function nearest(path, x) {
  const all = pointsOf(path);
  let low = 0;
  let high = all.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (all[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  const candidates = all.slice(Math.max(low - 1, 0), low + 1);
  if (!candidates.length) return null;
  const [at, y] = candidates.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
  if (!("reduced" in path.dataset)) return { x: at, low: y, high: y };
  const column = all.slice(Math.max(low - 4, 0), low + 4).filter((point) => Math.abs(point[0] - at) < COLUMN);
  const ys = column.map((point) => point[1]);
  return { x: at, low: Math.max(...ys), high: Math.min(...ys) };
}

function format(value, step) {
  const digits = Math.ceil(Math.log10(Math.abs(value) / step));
  const rounded = Number(value.toPrecision(Math.min(Math.max(digits, 1), 12)));
  return Math.abs(rounded) >= 1000 ? rounded.toLocaleString("en") : String(rounded);
}

function part(chart, name, tag) {
  const present = chart.querySelector(`.${name}`);
  if (present) return present;
  const element = chart.appendChild(document.createElementNS(SVG, tag));
  element.setAttribute("class", name);
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

function draw(chart, value) {
  const figure = chart.closest("figure") || chart.parentElement;
  const axes = scale(chart);
  let readout = figure.querySelector(".readout");
  const margin = (axes.high - axes.low) / 50; // curves may begin a step later than others
  if (value === null || value < axes.low - margin || value > axes.high + margin) {
    chart.querySelector(".cursor")?.remove();
    readout?.remove();
    return;
  }
  const lines = [...chart.querySelectorAll("path[data-name]")]
    .map((path) => ({ path, point: nearest(path, axes.x(value)) }))
    .filter(({ point }) => point);
  if (!lines.length) return;
  const at = lines.reduce((best, line) =>
    Math.abs(line.point.x - axes.x(value)) < Math.abs(best.point.x - axes.x(value)) ? line : best,
  ).point.x;
  set(part(chart, "cursor", "path"), { d: `M${at} ${TOP}V${axes.height - BOTTOM}` });
  readout = readout || figure.appendChild(Object.assign(document.createElement("div"), { className: "readout" }));
  readout.classList.toggle("left", at > axes.width / 2);
  const exact = (y) => {
    const number = axes.valueOfY(y);
    return "log" in chart.dataset
      ? format(10 ** number, (10 ** number * axes.span) / 2000)
      : format(number, axes.span / 2000);
  };
  const place = (x) => {
    const number = axes.valueOfX(x); // paths have one decimal across, so steps are rounded
    return chart.dataset.label === "step"
      ? Math.round(number).toLocaleString("en")
      : format(number, (axes.high - axes.low) / 2000);
  };
  const rows = lines.map(({ path, point }) => {
    const row = document.createElement("span");
    const mark = row.appendChild(document.createElement("i"));
    mark.className = `k${path.classList[0].slice(1)}`;
    const range = [...new Set([exact(point.low), exact(point.high)])].join(" to ");
    const remark = Math.abs(point.x - at) > FAR ? ` (at ${place(point.x)})` : "";
    row.append(`${path.dataset.name} ${range}${remark}`.trim());
    return row;
  });
  const head = document.createElement("b");
  head.textContent = `${chart.dataset.label} ${place(at)}`;
  readout.replaceChildren(head, ...rows);
}

// The arrow keys move the cursor of the curve that has the focus, by a fiftieth of its axis or, with Shift, by a point.
document.addEventListener("keydown", (event) => {
  const chart = chartOf(document.activeElement);
  const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!chart || !direction) return;
  event.preventDefault();
  const axes = scale(chart);
  const x = keyed === null ? (direction > 0 ? LEFT : axes.width - RIGHT) : axes.x(keyed);
  const path = chart.querySelector("path[data-name]");
  const beyond = pointsOf(path).filter((point) => (point[0] - x) * direction > 0.05);
  const point = beyond.at(direction > 0 ? 0 : -1);
  const stride = ((axes.width - LEFT - RIGHT) / 50) * direction;
  const moved = event.shiftKey ? (point ? point[0] : x) : x + stride;
  keyed = axes.valueOfX(Math.min(Math.max(moved, LEFT), axes.width - RIGHT));
  pointer = null;
  follow();
  chart.closest("figure")?.querySelector(".readout")?.setAttribute("role", "status");
});

function drawAll(chart, value) {
  for (const other of document.querySelectorAll("svg.chart[data-x]")) {
    draw(other, chart && other.dataset.label === chart.dataset.label ? value : null);
  }
}

// Draw the cursor at the last position of the pointer or the keys, over all curves with this axis.
export function follow() {
  const chart = pointer
    ? chartOf(document.elementFromPoint(pointer.clientX, pointer.clientY))
    : keyed !== null && chartOf(document.activeElement);
  const value = !chart ? null : pointer ? scale(chart).valueOfX(unitsOf(chart, pointer)) : keyed;
  drawAll(chart, value);
}

function select(event) {
  const x = unitsOf(begin.chart, event);
  const height = begin.chart.viewBox.baseVal.height - TOP - BOTTOM;
  const left = Math.min(x, begin.x);
  set(part(begin.chart, "selection", "rect"), { x: left, y: TOP, width: Math.abs(x - begin.x), height });
}

// Stretch what is drawn at once; the server's drawing follows.
function stretch(low, high, label) {
  for (const chart of document.querySelectorAll("svg.chart[data-x]")) {
    const axes = scale(chart);
    if (chart.dataset.label !== label) continue;
    const factor = (axes.width - LEFT - RIGHT) / (axes.x(high) - axes.x(low));
    chart.querySelector(".lines").setAttribute("transform", `matrix(${factor} 0 0 1 ${LEFT - factor * axes.x(low)} 0)`);
    chart.querySelectorAll("text.tick").forEach((tick) => tick.remove());
  }
}

document.addEventListener("pointermove", (event) => {
  pointer = event;
  keyed = null;
  if (begin) select(event);
  requestAnimationFrame(follow);
});
document.addEventListener("pointerdown", (event) => {
  const chart = event.button === 0 ? chartOf(event.target) : null;
  if (!chart) return;
  event.preventDefault(); // of selecting text
  begin = { chart, x: unitsOf(chart, event) };
});
document.addEventListener("pointerup", (event) => {
  if (!begin) return;
  const { chart, x } = begin;
  begin = null;
  chart.querySelector(".selection")?.remove();
  if (!chart.isConnected) return;
  const axes = scale(chart);
  const [low, high] = [x, unitsOf(chart, event)].sort((a, b) => a - b);
  if (high - low < SHORTEST) return;
  const range = [axes.valueOfX(low), axes.valueOfX(high)];
  const step = (axes.high - axes.low) / 2000;
  stretch(...range, chart.dataset.label);
  zoom({ from: format(range[0], step).replaceAll(",", ""), to: format(range[1], step).replaceAll(",", "") });
});
document.addEventListener("pointercancel", () => {
  begin?.chart.querySelector(".selection")?.remove();
  begin = null;
});
document.addEventListener("dblclick", (event) => {
  if (chartOf(event.target)) zoom({ from: null, to: null });
});
document.documentElement.addEventListener("pointerleave", () => {
  pointer = null;
  follow();
});
