"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const holder = document.getElementById("charts");
  if (!holder) return;
  const axis = document.getElementById("axis"), log = document.getElementById("log"), all = document.getElementById("all");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const fade = hex => hex + "59";
  const units = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
  const trim = (v, digits) => String(Number(v.toPrecision(digits)));
  function short(v, digits = 4) {
    if (v == null) return "–";
    const a = Math.abs(v), unit = units.find(([size]) => a >= size);
    if (unit && a >= 1e4) return trim(v / unit[0], digits) + unit[1];
    return a > 0 && a < 1e-3 ? v.toExponential(2).replace(/\.?0+e/, "e") : trim(v, Math.max(digits, a >= 1000 ? 4 : digits));
  }
  let charts = [], places = [];

  // a line of a chart: its points over the chosen axis, and how it is drawn
  function linesOf([title, unit, columns]) {
    const many = data.runs.length > 1, found = [];
    columns.forEach((column, c) => data.lines.forEach((lines, r) => {
      const line = lines[column];
      if (!line) return;
      const isVal = column.startsWith("val_") && columns.some(other => !other.startsWith("val_"));
      const number = many ? (columns.length > 2 ? r + c * data.runs.length : r) : c;
      const stroke = color("--c" + number % 8);
      const label = [many ? data.runs[r] : "", columns.length > 1 || !many ? column.replaceAll("_", " ") : ""]
        .filter(Boolean).join(" ");
      const scale = unit === "%" ? 100 : 1;
      const points = kind => {
        const xs = line[kind][axis.value], ys = line[kind][2], kept = [[], []];
        xs.forEach((x, i) => { if (x != null && ys[i] != null) { kept[0].push(x); kept[1].push(ys[i] * scale); } });
        return kept;
      };
      const raw = points("raw"), few = raw[0].length <= 60;
      if (line.smooth) {
        found.push({points: raw, label: label + ", raw", stroke: fade(stroke), width: 1, class: "raw"});
        found.push({points: points("smooth"), label, stroke, width: 2});
      } else {
        found.push({points: raw, label, stroke, width: 1.75, dash: isVal && many ? [5, 4] : undefined,
          dots: (isVal || raw[0].length < 4) && few});
      }
    }));
    return found;
  }

  function range(u, isLog) {  // of y: without the few highest values where they would hide the rest
    const [first, end] = u.series[0].idxs ?? [0, u.data[0].length - 1], values = [];  // x is not set yet
    u.series.forEach((s, i) => {
      if (i && s.show) for (const y of u.data[i].slice(first, end + 1)) if (y != null && (!isLog || y > 0)) values.push(y);
    });
    if (!values.length) return isLog ? [0.1, 1] : [0, 1];
    values.sort((a, b) => a - b);
    const low = values[0];
    let high = values[values.length - 1];
    const usual = values[Math.ceil(values.length * 0.97) - 1];
    if (isLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    if (!all.checked && values.length > 40 && high - low > 3 * (usual - low) && usual > low) high = low + 1.5 * (usual - low);
    const margin = 0.06 * (high - low) || Math.abs(high) * 0.05 || 0.5;
    return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
  }

  function draw(place, chart) {
    const [title, unit] = chart, lines = linesOf(chart), isLog = log.checked;
    if (!lines.some(line => line.points[0].length)) { place.hidden = true; return null; }
    place.hidden = false;
    const joined = uPlot.join(lines.map(line => line.points));
    const text = color("--dim"), grid = {stroke: color("--line"), width: 1};
    const base = {stroke: text, grid, ticks: grid, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif"};
    const xName = axis.value === "0" ? "step" : "tokens";
    const options = {
      width: Math.max(200, place.clientWidth - 20), height: 250,
      cursor: {sync: {key: "report", scales: ["x", null]}, drag: {x: true, y: false}, points: {size: 6}},
      scales: {x: {time: false}, y: {distr: isLog ? 3 : 1, range: u => range(u, isLog)}},
      axes: [
        {...base, label: xName === "step" ? "steps" : "tokens", labelSize: 18, size: 34, values: (u, vs) => vs.map(v => short(v))},
        {...base, label: unit || undefined, labelSize: 18, size: 58, values: (u, vs) => vs.map(v => v == null ? "" : short(v, 5))},
      ],
      series: [{label: xName, value: (u, v) => v == null ? "–" : Math.round(v).toLocaleString("en-US")}, ...lines.map(line => ({
        label: line.label, stroke: line.stroke, width: line.width, dash: line.dash, class: line.class, spanGaps: true,
        points: {show: !!line.dots, size: 6, fill: line.stroke}, value: (u, v) => short(v, 5),
      }))],
      legend: {live: true},
    };
    return new uPlot(options, joined, place);
  }

  function drawAll() {
    charts.forEach(chart => chart && chart.destroy());
    charts = data.charts.map((chart, i) => draw(places[i], chart));
  }

  const hasTokens = data.lines.some(lines => Object.values(lines).some(line => line.raw[1].some(x => x != null)));
  if (!hasTokens) axis.disabled = true;
  document.getElementById("switches").hidden = false;
  places = data.charts.map(([title, unit]) => {
    const place = document.createElement("div"), head = document.createElement("h3"), small = document.createElement("small");
    place.className = "chart";
    head.textContent = title + " ";
    small.textContent = unit;
    head.append(small);
    place.append(head);
    holder.append(place);
    return place;
  });
  drawAll();
  for (const control of [axis, log, all]) control.addEventListener("change", drawAll);
  dark.addEventListener("change", drawAll);
  let width = holder.clientWidth;
  addEventListener("resize", () => {
    if (holder.clientWidth === width) return;
    width = holder.clientWidth;
    charts.forEach((chart, i) => chart && chart.setSize({width: Math.max(200, places[i].clientWidth - 20), height: 250}));
  });
})();
