"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const holder = document.getElementById("charts");
  if (!holder) return;
  const [axis, log, all] = ["axis", "log", "all"].map(id => document.getElementById(id));
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const font = "12px system-ui, sans-serif", height = 250;
  const widthOf = place => Math.max(200, place.clientWidth - 20);

  function short(value, digits = 5, size = Math.abs(value)) {
    if (value == null) return "–";
    const trim = v => String(Number(v.toPrecision(digits)));
    const unit = value && size >= 1e4 && [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([least]) => size >= least);
    if (unit) return trim(value / unit[0]) + unit[1];
    return value && size < 1e-4 ? value.toExponential(2).replace(/\.?0+e/, "e") : trim(value);
  }

  // Labels of ticks, with as many digits as tell neighbors apart.
  function labelsOf(u, values) {
    const size = Math.max(...values.map(Math.abs)), digits = Math.ceil(Math.log10(size / Math.abs(values[1] - values[0]))) + 1;
    return values.map(v => v == null ? "" : short(v, Math.min(15, Math.max(5, digits || 0)), size));
  }

  const WHOLE = [...Array(15).keys()].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power));
  const sizeOf = (u, labels) => 16 + 8 * Math.max(5, ...(labels ?? []).map(label => label.length));

  const longest = Math.max(...data.lines.flatMap(run => Object.values(run).map(line => line.raw[2].at(-1) ?? 0)));
  const [second, unitOfTime] = longest > 7200 ? [3600, "hours"] : longest > 300 ? [60, "minutes"] : [1, "seconds"];
  axis.options[2].text = unitOfTime + " of training";

  // The lines of a chart: their points over the selected axis, and how each is drawn.
  function linesOf([title, unit, columns]) {
    const many = data.runs.length > 1, lines = [];
    columns.forEach((column, c) => data.lines.forEach((run, r) => {
      if (!run[column]) return;
      const isVal = column.startsWith("val_"), ofPair = columns[1] === "val_" + columns[0];
      const stroke = color("--c" + (many ? (ofPair ? r : r + c * data.runs.length) : c) % 8);
      const label = [many && data.runs[r], (!many || columns.length > 1) && data.labels[column]].filter(Boolean).join(" ");
      const errors = new Map();  // x -> one standard error below and above
      const points = kind => {
        const xs = run[column][kind][axis.value].map(x => x && axis.value == 2 ? x / second : x), [ys, sizes] = run[column][kind].slice(3), finite = [[], []];
        xs.forEach((x, i) => {
          if (x == null || ys[i] == null) return;
          finite[0].push(x); finite[1].push(unit === "%" ? ys[i] * 100 : ys[i]);
          if (sizes?.[i]) errors.set(x, [ys[i] - sizes[i], ys[i] + sizes[i]]);
        });
        return finite;
      };
      const raw = points("raw"), n = raw[0].length;
      if (run[column].smooth) {
        lines.push({points: raw, label: label + ", raw", stroke: stroke + "59", width: 1, class: "raw", errors});
        lines.push({points: points("smooth"), label, stroke, width: 2, errors: new Map()});
      } else {
        const dots = n < 4 || (isVal && n <= 60);
        lines.push({points: raw, label, stroke, width: 1.75, dash: isVal && many && ofPair ? [5, 4] : undefined, dots, errors});
      }
    }));
    return lines;
  }

  // The range of y: without the few highest values if they would hide the others. Amounts begin at 0.
  function rangeOf(u, lines, fromZero) {
    const [first, last] = u.series[0].idxs ?? [0, u.data[0].length - 1], shown = [];
    u.series.forEach((line, i) => {
      if (i && line.show) for (let at = first; at <= last; at++) shown.push(u.data[i][at], ...lines[i - 1].errors.get(u.data[0][at]) ?? []);
    });
    const values = shown.filter(y => y != null && (!log.checked || y > 0)).sort((a, b) => a - b);
    const n = values.length, low = values[0] ?? (log.checked ? 0.1 : 0);
    let high = values[n - 1] ?? 1;
    if (log.checked) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    const usual = values[Math.ceil(n * 0.97) - 1];
    if (!all.checked && n > 40 && usual > low && high - low > 3 * (usual - low)) high = low + 1.5 * (usual - low);
    const margin = 0.06 * (high - low) || Math.abs(high) * 0.05 || 0.5;
    return [low >= 0 && (low < margin || fromZero) ? 0 : low - margin, high + margin];
  }

  // The value at the mouse, or without one the last value, which is not smoothed; with its standard error.
  function shown(u, value, s, i, line) {
    const values = u.data[s - (u.series[s - 1]?.class === "raw")], at = i ?? values.findLastIndex(v => v != null);
    if (!line) return values[at];
    const y = i == null ? values[at] : value, [low] = line.errors.get(u.data[0][at]) ?? [];
    return short(y) + (low != null && y != null ? " ± " + short(y - low) : "");
  }

  const xValue = x => axis.value == 2 ? short(x, 3) : Math.round(x).toLocaleString("en-US");

  // One standard error below and above each point of a line.
  function drawErrors(u, {errors, stroke}) {
    const {ctx, bbox: {left, top, width, height}} = u;
    ctx.save(); ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
    ctx.beginPath(); ctx.strokeStyle = stroke; ctx.lineWidth = devicePixelRatio;
    errors.forEach((ends, x) => ends.forEach((y, i) => ctx[i ? "lineTo" : "moveTo"](u.valToPos(x, "x", true), u.valToPos(y, "y", true))));
    ctx.stroke(); ctx.restore();
  }

  function draw(place, chart) {
    const lines = linesOf(chart);
    place.hidden = !lines.some(line => line.points[0].length);
    if (place.hidden) return null;
    const grid = {stroke: color("--line"), width: 1}, x = axis.selectedOptions[0].text;
    const side = {stroke: color("--dim"), grid, ticks: grid, font, labelFont: font, labelSize: 18};
    return new uPlot({
      width: widthOf(place), height,
      cursor: {sync: {key: "report", scales: ["x", null]}, drag: {x: true, y: false}, points: {size: 6}},
      legend: {markers: {dash: (u, i) => u.series[i].dash ? "dashed" : "solid"}},
      scales: {x: {time: false}, y: {distr: log.checked ? 3 : 1, range: u => rangeOf(u, lines, ["GB", "s", "%", "tokens/s"].includes(chart[1]))}},
      axes: [
        {...side, label: x, size: 34, incrs: axis.value < 2 ? WHOLE : undefined, values: labelsOf},
        {...side, label: chart[1] || undefined, size: sizeOf, values: labelsOf},
      ],
      series: [{label: x, value: (u, v, s, i) => xValue(shown(u, v, s, i))}, ...lines.map(line => ({
        ...line, spanGaps: true, points: {show: !!line.dots, size: 6, fill: line.stroke}, value: (...at) => shown(...at, line),
      }))],
      hooks: {drawSeries: [(u, s) => s && drawErrors(u, lines[s - 1])]},
    }, uPlot.join(lines.map(line => line.points)), place);
  }

  const places = data.charts.map(([title]) => {
    const place = document.createElement("div"), head = document.createElement("h3");
    place.className = "chart";
    head.textContent = title;
    place.append(head);
    holder.append(place);
    return place;
  });
  let charts = [];
  function drawAll() {
    charts.forEach(chart => chart?.destroy());
    charts = data.charts.map((chart, i) => draw(places[i], chart));
  }
  for (const option of axis.options)
    option.disabled = !data.lines.some(run => Object.values(run).some(line => line.raw[option.value].some(x => x != null)));
  axis.value = data.axis;
  document.getElementById("switches").hidden = false;
  drawAll();
  for (const control of [axis, log, all, matchMedia("(prefers-color-scheme: dark)")]) control.addEventListener("change", drawAll);
  new ResizeObserver(() => charts.forEach((chart, i) => chart?.setSize({width: widthOf(places[i]), height}))).observe(holder);
})();
