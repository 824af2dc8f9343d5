"use strict";
// Draws every chart of the page from the data inside of it. Colours come from the style sheet, so that a change of scheme
// needs no more than another drawing.
(() => {
  const charts = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const drawn = [];
  const AXIS = 56;
  const WHOLE = [...Array(8).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));  // a step has no half
  const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";

  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // Numbers as the rest of the page writes them: three digits, decimal units.
  function scaled(value, units, gap) {
    let power = 0;
    while (Math.abs(value) >= 999.5 && power < units.length - 1) { value /= 1000; power += 1; }
    const digits = power === 0 || Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2;
    return value.toFixed(digits) + (units[power] ? gap + units[power] : "");
  }
  const plain = (value) => {
    const size = Math.abs(value);
    return value === 0 ? "0" : size < 1e-3 || size >= 1e5 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  };
  const BYTES = ["B", "kB", "MB", "GB", "TB", "PB"];
  const COUNTS = ["", "k", "M", "B"];
  const show = {
    bits: (value) => `${value.toFixed(3)} bits/byte`,
    nats: (value) => `${value.toFixed(4)} nats`,
    bytes: (value) => scaled(value, BYTES, " "),
    rate: (value) => `${value < 99999.5 ? Math.round(value).toLocaleString("en") : scaled(value, COUNTS, "")} tokens/s`,
    number: plain,
  };

  // All ticks of an axis in one unit: that of the largest.
  function ticks(values, units, gap) {
    const most = Math.max(...values.map(Math.abs));
    let power = 0;
    while (most / 1000 ** power >= 1000 && power < units.length - 1) power += 1;
    const unit = units[power] ? gap + units[power] : "";
    return values.map((value) => (value === 0 ? "0" : Number((value / 1000 ** power).toPrecision(6)) + unit));
  }
  const tick = {
    bytes: (values) => ticks(values, BYTES, " "),
    rate: (values) => ticks(values, COUNTS, ""),
  };
  const small = (values) => {
    const tiny = Math.max(...values.map(Math.abs)) < 0.01;
    const short = (value) => Number(value.toPrecision(6));
    return values.map((value) => (value === 0 ? "0" : tiny ? short(value).toExponential() : String(short(value))));
  };

  // Lines of all traces over the union of their steps. A missing step is undefined and is bridged, a null is a gap.
  function columns(chart) {
    const lines = chart.traces.flatMap((trace) => trace.lines);
    const [steps, ...values] = uPlot.join(chart.traces.map((trace) => [trace.steps, ...trace.lines.map((line) => line.values)]));
    return { lines, steps, values };
  }

  // Areas lie on those before them; the topmost is drawn first, so that each covers the foot of the one above.
  function stacked({ lines, steps, values }) {
    const total = steps.map(() => null);
    const areas = [];
    lines.forEach((line, at) => {
      if (line.look !== "area") return;
      values[at].forEach((value, row) => { if (value != null) total[row] = (total[row] ?? 0) + value; });
      areas.unshift({ line, heights: total.slice(), values: values[at] });
    });
    const others = lines.map((line, at) => ({ line, heights: values[at], values: values[at] }));
    return [...areas, ...others.filter(({ line }) => line.look !== "area")];
  }

  const WIDTHS = { line: 1.5, dashed: 1.5, wide: 4, broad: 8 };
  function series({ line, heights }) {
    const paint = () => color(line.color);
    if (line.look === "area") return { stroke: () => color("panel"), width: 1, fill: paint, points: { show: false } };
    const alone = heights.filter((value) => value != null).length < 2;  // one point makes no line
    if (line.look === "points" || alone) {
      return { stroke: paint, paths: () => null, points: { show: true, size: 7, width: 0, stroke: paint, fill: paint } };
    }
    const dash = line.look === "dashed" ? [5, 4] : undefined;
    return { stroke: paint, width: WIDTHS[line.look], dash, points: { show: false } };
  }

  // From zero for what is counted; a loss fits its window, and its yardsticks belong to the whole view only.
  function range(chart) {
    const fits = chart.unit === "bits" || chart.unit === "nats";
    return (u, low, high) => {
      const [first, last] = u.series[0].idxs;
      const whole = first === 0 && last === u.data[0].length - 1;
      const all = [low, high, ...(whole || !fits ? chart.levels.map((level) => level.value) : [])].filter(Number.isFinite);
      if (!all.length) return [0, 1];
      const [bottom, top] = [Math.min(...all), Math.max(...all, chart.top ?? -Infinity)];
      if (!fits) return [Math.min(0, bottom), top > 0 ? top * (chart.levels.length ? 1.2 : 1.06) : 1];
      const room = (top - bottom) * 0.08 || Math.abs(top) * 0.1 || 1;
      return [bottom - room, top + room];
    };
  }

  function axes(chart) {
    const font = `11px ${FONT}`;
    const border = { show: true, stroke: () => color("hair"), width: 1 };
    const shared = { stroke: () => color("soft"), font, ticks: { show: false }, border };
    const lines = { stroke: () => color("grid"), width: 1 };
    const named = { label: "step", labelSize: 16, labelGap: 0, labelFont: font };
    const below = { grid: { show: false }, size: 20, gap: 4, space: 60, ...named };
    const beside = { grid: lines, size: AXIS, gap: 6, space: 28 };
    return [
      { ...shared, ...below, incrs: WHOLE, values: (u, steps) => ticks(steps, ["", "k", "M"], "") },
      { ...shared, ...beside, values: (u, values) => (tick[chart.unit] ?? small)(values) },
    ];
  }

  // Horizontal lines with their names, which keep out of each other's way.
  function drawLevels(u, chart) {
    const { ctx, bbox } = u, ratio = uPlot.pxRatio;
    const shown = chart.levels.filter(({ value }) => value >= u.scales.y.min && value <= u.scales.y.max)
      .map((level) => ({ ...level, y: Math.round(u.valToPos(level.value, "y", true)) + 0.5 })).sort((a, b) => a.y - b.y);
    ctx.save();
    ctx.font = `${11 * ratio}px ${FONT}`;
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    const edge = bbox.left + bbox.width - (chart.marks.length ? 14 : 4) * ratio;
    let free = -Infinity;
    for (const level of shown) {
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.lineWidth = ratio;
      ctx.strokeStyle = color("soft");
      ctx.beginPath();
      ctx.moveTo(bbox.left, level.y);
      ctx.lineTo(bbox.left + bbox.width, level.y);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    ctx.lineWidth = 3 * ratio;
    ctx.lineJoin = "round";
    ctx.strokeStyle = color("panel");
    ctx.fillStyle = color("soft");
    for (const level of shown) {
      const text = `${level.name} ${chart.unit === "bits" ? level.value.toFixed(2) : show[chart.unit](level.value)}`;
      const above = level.y - ratio;
      const at = above - 12 * ratio >= Math.max(free, bbox.top) ? above : Math.max(level.y + 13 * ratio, free + 12 * ratio);
      free = at;
      ctx.strokeText(text, edge, at);
      ctx.fillText(text, edge, at);
    }
    ctx.restore();
  }

  // A save is a small triangle at the foot, a resume a dashed line over the whole height.
  function drawMarks(u, chart) {
    const { ctx, bbox } = u, ratio = uPlot.pxRatio, foot = bbox.top + bbox.height;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("ink");
    ctx.lineWidth = ratio;
    for (const mark of chart.marks) {
      if (mark.step < u.scales.x.min || mark.step > u.scales.x.max) continue;
      const x = u.valToPos(mark.step, "x", true);
      ctx.beginPath();
      if (mark.kind === "resume") {
        ctx.setLineDash([3 * ratio, 3 * ratio]);
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, foot);
        ctx.stroke();
      } else {
        ctx.moveTo(x, foot - 8 * ratio);
        ctx.lineTo(x - 5 * ratio, foot);
        ctx.lineTo(x + 5 * ratio, foot);
        ctx.fill();
      }
    }
    ctx.restore();
  }

  function node(name, className, text) {
    const made = document.createElement(name);
    made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // What is under the cursor: the step, every value there, and what happened near it.
  function fillTip(u, tip, chart, lines) {
    const at = u.cursor.idx;
    if (at == null || u.cursor.left < 0) { tip.style.display = "none"; return; }
    const step = u.data[0][at];
    const rows = [node("div", "said", `step ${step.toLocaleString("en")}`)];
    for (const { line, values } of lines) {
      if (values[at] == null) continue;
      const value = show[line.unit ?? chart.unit](values[at]);
      if (line.look === "none") {  // the same in another unit
        rows[rows.length - 1].lastChild.append(`, ${value}`);
        continue;
      }
      const row = node("div", "");
      row.append(node("i", `swatch ${line.look} c-${line.color}`), node("span", "", line.name), node("span", "", value));
      rows.push(row);
    }
    const near = chart.marks.filter((mark) => Math.abs(u.valToPos(mark.step, "x") - u.cursor.left) < 6);
    rows.push(...near.slice(0, 4).map((mark) => node("div", "said", mark.text)));
    tip.replaceChildren(...rows);
    tip.style.display = "block";
    const over = u.over.offsetLeft + u.cursor.left;
    const room = u.root.clientWidth - tip.offsetWidth;
    const beside = over + 14 > room ? over - tip.offsetWidth - 14 : over + 14;
    tip.style.left = `${Math.max(0, Math.min(beside, room))}px`;
    tip.style.top = "4px";
  }

  function build(place) {
    const chart = charts[place.dataset.chart];
    const parts = columns(chart);
    const lines = stacked(parts);
    const painted = lines.filter(({ line }) => line.look !== "none");
    const tip = node("div", "tip");
    const count = painted.reduce((sum, { values }) => sum + values.filter((value) => value != null).length, 0);
    const plot = new uPlot({
      width: place.clientWidth,
      height: place.clientHeight,
      padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false }, sync: { key: chart.group ?? chart.title } },
      scales: { x: { time: false }, y: { range: range(chart) } },
      axes: axes(chart),
      series: [{}, ...painted.map(series)],
      hooks: {
        draw: [(u) => { drawLevels(u, chart); drawMarks(u, chart); place.dataset.drawn = `${count} points`; }],
        setCursor: [(u) => fillTip(u, tip, chart, lines)],
      },
    }, [parts.steps, ...painted.map(({ heights }) => heights)], place);
    place.append(tip);
    drawn.push({ place, plot });
  }

  function fit() {
    for (const { place, plot } of drawn) plot.setSize({ width: place.clientWidth, height: place.clientHeight });
  }
  function repaint() {
    for (const { plot } of drawn) plot.redraw(false, true);
  }

  document.querySelectorAll(".plot").forEach(build);
  const resizing = new ResizeObserver(fit);
  document.querySelectorAll(".plot").forEach((place) => resizing.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  // Paper is white and narrow, whatever the window is.
  for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => { root.classList.toggle("printing", printing); fit(); repaint(); });
  }
})();
