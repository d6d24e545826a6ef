// Draws the figures of the page: bars and lines on linear, logarithmic and named axes.
// A figure is what charts.py makes: a list of traces, and a layout. Texts of users become text nodes, never markup.
"use strict";
const SVG = "http://www.w3.org/2000/svg", INK = "#24292f", GRID = "#e6e9ec";
const DASHES = {solid: "", dash: "7 4", dot: "2 4", dashdot: "8 3 2 3"};

function add(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}

function plain(text) {
  return String(text).replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
}

function prefixed(value) {
  if (!value) return "0";
  const step = Math.max(-3, Math.min(4, Math.floor(Math.log10(Math.abs(value)) / 3)));
  return +(value / 1000 ** step).toPrecision(3) + ["n", "µ", "m", "", "k", "M", "G", "T"][step + 3];
}

function format(value, how) {
  if (typeof value === "string") return plain(value);
  if (!how) return String(value);
  const digits = parseInt(how.slice(1), 10);
  return how.endsWith("s") ? prefixed(value) : how.endsWith("g") ? String(+value.toPrecision(digits)) : value.toFixed(digits);
}

function hint(trace, x, y) {
  return plain((trace.hovertemplate || "").replace(/<extra>.*/, "").replace(
    /%\{([xy])(?::([^}]*))?\}/g, (_, axis, how) => format(axis === "x" ? x : y, how)));
}

function superscript(exponent) {
  return "10" + String(exponent).replace("-", "⁻").replace(/\d/g, digit => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
}

// An axis places values between two ends, and has ticks: [place of the value, text].
function makeAxis(options, values, from, to) {
  if (values.some(value => typeof value === "string")) {
    const names = [...new Set(values)], band = (to - from) / names.length;
    const middle = name => from + (names.indexOf(name) + .5) * band;
    return {at: middle, ticks: names.map(name => [middle(name), plain(name)]), band: Math.abs(band), names};
  }
  const isLog = options.type === "log", scale = isLog ? Math.log10 : value => value;
  let [low, high] = options.range || [isLog ? Math.min(...values.map(scale)) : 0, Math.max(...values.map(scale))];
  const pad = options.range ? 0 : .05 * (high - low || 1);
  high += pad;
  if (isLog) low -= pad;
  const at = value => from + (scale(value) - low) / (high - low) * (to - from);
  const suffix = options.ticksuffix || "";
  let ticks;
  if (options.tickvals) {
    ticks = options.tickvals.map((value, i) => [at(value), options.ticktext[i]]);
  } else if (isLog) {
    const decades = [];
    for (let e = Math.ceil(low); e <= high; e += options.exponentformat === "power" ? 2 : 1) decades.push(e);
    const wanted = decades.length > 1 ? decades.map(e => 10 ** e) :
      [1, 2, 5].flatMap(m => [Math.floor(low), Math.floor(low) + 1].map(e => m * 10 ** e));
    ticks = wanted.filter(v => scale(v) >= low && scale(v) <= high).map(v => [at(v),
      options.exponentformat === "power" ? superscript(Math.round(scale(v))) :
      (options.exponentformat === "SI" ? prefixed(v) : String(+v.toPrecision(3))) + suffix]);
  } else {
    const raw = (high - low) / 6, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
    ticks = [];
    for (let value = 0; value <= high; value += step) ticks.push([at(value), +value.toPrecision(6) + suffix]);
  }
  return {at, ticks: ticks.filter(([place]) => place >= Math.min(from, to) - 1 && place <= Math.max(from, to) + 1)};
}

function draw(target, figure, hidden) {
  const {data, layout} = figure, width = Math.max(320, target.clientWidth), height = layout.height;
  const shown = data.filter(trace => trace.visible !== false && !hidden.has(trace.legendgroup || trace.name));
  const values = axis => shown.flatMap(trace => trace[axis]);
  const all = axis => data.filter(trace => trace.visible !== false).flatMap(trace => trace[axis]);
  const names = all("y").filter(value => typeof value === "string");
  const left = names.length ? Math.min(.4 * width, 16 + 7.5 * Math.max(...names.map(name => plain(name).length))) : 76;
  const right = width - (data.some(trace => trace.mode === "text") ? 70 : 20), top = 24, bottom = height - 56;
  const svg = add(target, "svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "font-family": "system-ui, sans-serif", "font-size": 13, fill: INK, class: "drawn"});
  if (!shown.length) return;
  const x = makeAxis(layout.xaxis, values("x"), left, right);
  const isReversed = layout.yaxis.autorange === "reversed";
  const y = makeAxis(layout.yaxis, values("y"), isReversed ? top : bottom, isReversed ? bottom : top);
  let free = -Infinity;  // the end of the last text: on a narrow window, texts that would overlap are left out
  for (const [place, text] of x.ticks) {
    if (!x.names) add(svg, "path", {d: `M${place} ${top}V${bottom}`, stroke: GRID});
    const half = 4 * text.length;
    if (place - half < free) continue;
    add(svg, "text", {x: place, y: bottom + 18, "text-anchor": "middle"}, text);
    free = place + half;
  }
  for (const [place, text] of y.ticks) {
    if (!y.names) add(svg, "path", {d: `M${left} ${place}H${right}`, stroke: GRID});
    add(svg, "text", {x: left - 8, y: place + 4, "text-anchor": "end"}, text);
  }
  const middle = (left + right) / 2;
  add(svg, "text", {x: middle, y: height - 14, "text-anchor": "middle"}, plain(layout.xaxis.title.text));
  add(svg, "text", {x: 0, y: top - 6, "font-size": 12}, plain(layout.yaxis.title.text));
  drawBars(svg, shown.filter(trace => trace.type === "bar"), x, y, layout.barmode === "stack", bottom);
  for (const trace of shown.filter(each => each.type === "scatter")) drawPoints(svg, trace, x, y);
}

function drawBars(svg, bars, x, y, isStacked, bottom) {
  const ends = {};
  bars.forEach((trace, number) => trace.x.forEach((_, i) => {
    const isFlat = trace.orientation === "h", name = isFlat ? trace.y[i] : trace.x[i];
    const axis = isFlat ? y : x, wide = .7 * axis.band / (isStacked ? 1 : bars.length);
    const from = axis.at(name) - .35 * axis.band + (isStacked ? 0 : number * wide);
    const begin = isStacked ? ends[name] || 0 : 0, end = begin + (isFlat ? trace.x[i] : trace.y[i]);
    ends[name] = end;
    const box = isFlat ? {x: x.at(begin), y: from, width: Math.max(0, x.at(end) - x.at(begin)), height: wide} :
      {x: from, y: y.at(end), width: wide, height: Math.max(0, bottom - y.at(end))};
    const bar = add(svg, "rect", {...box, fill: trace.marker.color, stroke: "#ffffff", class: "point"});
    add(bar, "title", {}, hint(trace, trace.x[i], trace.y[i]));
  }));
}

function drawPoints(svg, trace, x, y) {
  const points = trace.x.map((value, i) => [x.at(value), y.at(trace.y[i])]);
  if (trace.mode === "lines") {
    add(svg, "path", {d: "M" + points.map(point => point.join(" ")).join("L"), fill: "none", stroke: trace.line.color,
      "stroke-width": trace.line.width, "stroke-dasharray": DASHES[trace.line.dash || "solid"]});
  }
  points.forEach(([px, py], i) => {
    if (trace.mode !== "text") {
      const isLine = trace.mode === "lines", r = isLine ? 6 : trace.marker.size / 2;
      const mark = isLine || trace.marker.symbol !== "diamond" ? add(svg, "circle", {cx: px, cy: py, r}) :
        add(svg, "path", {d: `M${px} ${py - r}L${px + r} ${py}L${px} ${py + r}L${px - r} ${py}z`, stroke: "#ffffff"});
      mark.setAttribute("fill", isLine ? "transparent" : trace.marker.color);
      add(mark, "title", {}, hint(trace, trace.x[i], trace.y[i]));
    }
    if (trace.text) {
      const place = trace.textposition || "middle right", dy = {t: -10, b: 20}[place[0]] || 4;
      add(svg, "text", {x: px, y: py + dy, "text-anchor": place.endsWith("right") ? "start" : "middle"},
        plain(trace.text[i]));
    }
  });
}

function showFigure(target, figure) {
  const hidden = new Set(), plot = document.createElement("div"), title = document.createElement("h3");
  title.textContent = plain(figure.layout.title.text);
  target.append(title, plot);
  const redraw = () => {
    plot.replaceChildren();
    draw(plot, figure, hidden);
    if (figure.layout.showlegend !== false) plot.append(makeLegend(figure, hidden, redraw));
  };
  for (const menu of figure.layout.updatemenus || []) {
    const select = document.createElement("select");
    plot.before(select);
    for (const button of menu.buttons) select.add(new Option(button.label));
    select.onchange = () => {
      const flags = menu.buttons[select.selectedIndex].args[0].visible;
      figure.data.forEach((trace, i) => { trace.visible = flags[i]; });
      redraw();
    };
  }
  redraw();
  window.addEventListener("resize", redraw);
}

function makeLegend(figure, hidden, redraw) {
  const legend = document.createElement("div");
  legend.className = "legend";
  for (const trace of figure.data.filter(each => each.showlegend !== false && each.visible !== false)) {
    const group = trace.legendgroup || trace.name, item = legend.appendChild(document.createElement("button"));
    item.style.opacity = hidden.has(group) ? .4 : 1;
    const sample = add(item, "svg", {width: 26, height: 10}), color = (trace.line || trace.marker).color;
    add(sample, "path", {d: "M0 5H26", stroke: color, "stroke-width": trace.line ? 3 : 10,
      "stroke-dasharray": DASHES[(trace.line || {}).dash || "solid"]});
    item.append(" " + plain(trace.name));
    item.onclick = () => {
      if (!hidden.delete(group)) hidden.add(group);
      redraw();
    };
  }
  return legend;
}

for (const source of document.querySelectorAll("script.figure")) {
  showFigure(document.getElementById(source.dataset.target), JSON.parse(source.textContent));
}
