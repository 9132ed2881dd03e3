"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const holder = document.getElementById("charts");
  if (!holder) return;
  const [axis, log, all] = ["axis", "log", "all"].map(id => document.getElementById(id));
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const font = "12px system-ui, sans-serif", height = 250;
  const widthOf = place => Math.max(200, place.clientWidth - 20);

  function short(value, digits = 5) {
    if (value == null) return "–";
    const size = Math.abs(value), trim = v => String(Number(v.toPrecision(digits)));
    const unit = size >= 1e4 && [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([least]) => size >= least);
    if (unit) return trim(value / unit[0]) + unit[1];
    return size > 0 && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : trim(value);
  }

  // Labels of ticks, with as many digits as tell neighbors apart.
  function labelsOf(u, values) {
    const size = Math.max(...values.map(Math.abs)), digits = Math.ceil(Math.log10(size / Math.abs(values[1] - values[0]))) + 1;
    return values.map(v => v == null ? "" : short(v, Math.min(15, Math.max(5, digits || 0))));
  }

  const WHOLE = [...Array(15).keys()].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power));
  const sizeOf = (u, labels) => 16 + 7 * Math.max(6, ...(labels ?? []).map(label => label.length));

  // The lines of a chart: their points over the selected axis, and how each is drawn.
  function linesOf([title, unit, columns]) {
    const many = data.runs.length > 1, lines = [];
    columns.forEach((column, c) => data.lines.forEach((run, r) => {
      if (!run[column]) return;
      const isVal = column.startsWith("val_"), ofPair = columns[1] === "val_" + columns[0];
      const stroke = color("--c" + (many ? (ofPair ? r : r + c * data.runs.length) : c) % 8);
      const label = [many && data.runs[r], (!many || columns.length > 1) && data.labels[column]].filter(Boolean).join(" ");
      const points = kind => {
        const xs = run[column][kind][axis.value], ys = run[column][kind][3], finite = [[], []];
        xs.forEach((x, i) => {
          if (x != null && ys[i] != null) { finite[0].push(x); finite[1].push(unit === "%" ? ys[i] * 100 : ys[i]); }
        });
        return finite;
      };
      const raw = points("raw"), n = raw[0].length;
      if (run[column].smooth) {
        lines.push({points: raw, label: label + ", raw", stroke: stroke + "59", width: 1, class: "raw"});
        lines.push({points: points("smooth"), label, stroke, width: 2});
      } else {
        const dots = n < 4 || (isVal && n <= 60);
        lines.push({points: raw, label, stroke, width: 1.75, dash: isVal && many && ofPair ? [5, 4] : undefined, dots});
      }
    }));
    return lines;
  }

  // The range of y: without the few highest values if they would hide the others. Amounts begin at 0.
  function rangeOf(u, fromZero) {
    const [first, last] = u.series[0].idxs ?? [0, u.data[0].length - 1], values = [];
    u.series.forEach((line, i) => {
      if (i && line.show) values.push(...u.data[i].slice(first, last + 1).filter(y => y != null && (!log.checked || y > 0)));
    });
    values.sort((a, b) => a - b);
    const n = values.length, low = values[0] ?? (log.checked ? 0.1 : 0);
    let high = values[n - 1] ?? 1;
    if (log.checked) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    const usual = values[Math.ceil(n * 0.97) - 1];
    if (!all.checked && n > 40 && usual > low && high - low > 3 * (usual - low)) high = low + 1.5 * (usual - low);
    const margin = 0.06 * (high - low) || Math.abs(high) * 0.05 || 0.5;
    return [low >= 0 && (low < margin || fromZero) ? 0 : low - margin, high + margin];
  }

  // The value at the mouse; without one, the last: of a smoothed line, that of the step itself.
  const shown = (u, value, s, i) => i == null ? u.data[s - (u.series[s - 1]?.class === "raw")].findLast(v => v != null) : value;

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
      scales: {x: {time: false}, y: {distr: log.checked ? 3 : 1, range: u => rangeOf(u, ["GB", "s", "%", "tokens/s"].includes(chart[1]))}},
      axes: [
        {...side, label: x, size: 34, incrs: axis.value < 2 ? WHOLE : undefined, values: labelsOf},
        {...side, label: chart[1] || undefined, size: sizeOf, values: labelsOf},
      ],
      series: [{label: x, value: (u, v, s, i) => Math.round(shown(u, v, s, i)).toLocaleString("en-US")}, ...lines.map(line => ({
        ...line, spanGaps: true, points: {show: !!line.dots, size: 6, fill: line.stroke}, value: (...at) => short(shown(...at)),
      }))],
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
