// Draws the curves of the page with uPlot, and makes its tables sortable. The data is in the element #data. Text comes
// from runs, which may be anybody's: it gets into the page only as text.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const COLORS = 6, STYLES = 24;
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const WHOLE = [...Array(16).keys()].flatMap((power) => [1, 2, 5].map((each) => each * 10 ** power));
  const HEIGHT = 250, MOST_IN_TIP = 8;
  const settings = { axis: "own", log: false, smooth: 0, hidden: new Set() };
  const charts = new Map(); // element -> uPlot

  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // Numbers and times as text.
  const short = (value) => (value == null ? "" : Number(value.toPrecision(5)).toString());
  function span(seconds) {
    if (Math.abs(seconds) >= 172800) return short(seconds / 86400) + " d";
    if (Math.abs(seconds) >= 7200) return short(seconds / 3600) + " h";
    if (Math.abs(seconds) >= 120) return short(seconds / 60) + " min";
    return short(seconds) + " s";
  }

  // The place of a point on another axis, between the ends of the epochs before and after it.
  function mapped(run, from, to, x) {
    const a = data.runs[run][from], b = data.runs[run][to];
    if (a.length < 2) return from === to ? x : null;
    let low = 0, high = a.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (a[middle] <= x) low = middle; else high = middle;
    }
    const width = a[high] - a[low];
    return width > 0 ? b[low] + ((x - a[low]) / width) * (b[high] - b[low]) : b[high];
  }

  // The points of a line on the chosen axis, growing, without values that a logarithm does not have.
  function points(chart, line) {
    const axis = settings.axis === "own" ? chart.x : settings.axis;
    const xs = [], ys = [];
    let before = -Infinity;
    line.x.forEach((x, index) => {
      let place = axis === chart.x ? x : mapped(line.run, chart.x, axis, x);
      if (place === null) return;
      if (place <= before) place = before + Math.max(1e-9, Math.abs(before) * 1e-12);
      before = place;
      const y = line.y[index];
      xs.push(place);
      ys.push(y === null || (settings.log && y <= 0) ? null : y);
    });
    return [xs, ys];
  }

  // An exponential moving average of the points, which begins with the first.
  function smoothed(ys) {
    const keep = settings.smooth;
    let mean = 0, weight = 0;
    return ys.map((y) => {
      if (y === null) return null;
      mean = keep * mean + (1 - keep) * y;
      weight = keep * weight + (1 - keep);
      return mean / weight;
    });
  }

  const axisName = (chart) => (settings.axis === "own" ? chart.x : settings.axis);

  function build(element) {
    const chart = data.charts[Number(element.dataset.chart)];
    const old = charts.get(element);
    if (old) old.destroy();
    const lines = chart.lines.filter((line) => !settings.hidden.has(line.run));
    const tables = [], series = [{}], shown = [null];
    for (const line of lines) {
      const [xs, ys] = points(chart, line);
      const style = { stroke: color("--c" + (line.color % COLORS)), dash: DASHES[Math.floor(line.color / COLORS) % DASHES.length] };
      const single = { show: xs.length < 40, size: 5 };
      if (settings.smooth > 0) {
        tables.push([xs, ys]);
        series.push({ ...style, width: 1, alpha: 0.25, points: { show: false } });
        shown.push(null);
      }
      tables.push([xs, settings.smooth > 0 ? smoothed(ys) : ys]);
      series.push({ ...style, width: 1.75, points: single });
      shown.push(line);
    }
    const joined = tables.length ? uPlot.join(tables) : [[]];
    const isLog = settings.log && joined.slice(1).some((ys) => ys.some((y) => y > 0));
    const isTime = axisName(chart) === "seconds";
    const ink = color("--soft"), grid = { stroke: color("--line"), width: 1 };
    const ticks = { stroke: color("--line"), width: 1, size: 5 };
    const label = { epoch: "epoch", iteration: "iteration", seconds: "time" }[axisName(chart)];
    const font = "12px system-ui, sans-serif";
    const options = {
      width: Math.max(200, element.clientWidth), height: HEIGHT, legend: { show: false },
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
      series,
      axes: [
        { stroke: ink, grid, ticks, font, label, labelFont: font, labelSize: 18, size: 34, space: 70,
          ...(isTime ? {} : { incrs: WHOLE }),
          values: (u, splits) => splits.map((x) => (isTime ? span(x) : x.toLocaleString("en-US"))) },
        { stroke: ink, grid, ticks, font, size: 68,
          values: (u, splits) => splits.map((y) => (y === null ? "" : Math.abs(y) >= 1e5 ? y.toExponential(1) : short(y))) },
      ],
      cursor: { points: { size: 7 }, dataIdx: nearest, drag: { x: true, y: false, dist: 5 } },
      hooks: { setCursor: [(u) => tell(u, element, chart, shown)] },
    };
    const made = new uPlot(options, joined, element);
    made.canvas = made.root.querySelector("canvas");
    made.canvas.setAttribute("aria-hidden", "true");
    charts.set(element, made);
    tell(made, element, chart, shown);
  }

  // The index of the point of a line that is nearest to the cursor: joined lines have points at different places.
  function nearest(u, index, hovered) {
    const ys = u.data[index], xs = u.data[0];
    if (index === 0 || ys[hovered] != null) return hovered;
    let left = hovered, right = hovered;
    while (left >= 0 && ys[left] == null) left--;
    while (right < ys.length && ys[right] == null) right++;
    if (left < 0) return right < ys.length ? right : hovered;
    if (right >= ys.length) return left;
    return xs[hovered] - xs[left] <= xs[right] - xs[hovered] ? left : right;
  }

  // Say the values at the cursor below the chart; without a cursor, which line is which.
  function tell(u, element, chart, shown) {
    const tip = element.parentElement.querySelector(".tip");
    const at = u.cursor.idx;
    let entries = [];
    shown.forEach((line, index) => {
      if (line === null) return;
      const place = at == null ? null : u.cursor.idxs[index];
      const value = place == null ? null : u.data[index][place];
      const distance = value == null ? Infinity : Math.abs(u.valToPos(value, "y") - u.cursor.top);
      entries.push({ line, value, distance });
    });
    const many = entries.length > MOST_IN_TIP;
    if (many) entries = at == null ? [] : entries.sort((a, b) => a.distance - b.distance).slice(0, 3);
    tip.replaceChildren();
    if (at != null) {
      const x = u.data[0][at];
      tip.append((axisName(chart) === "seconds" ? span(x) : axisName(chart) + " " + short(x)) + ": ");
    }
    for (const { line, value } of entries) {
      const entry = document.createElement("span"), key = document.createElement("span");
      entry.className = "entry";
      key.className = "key run" + (line.color % STYLES);
      entry.append(key, line.label + (value == null ? "" : " " + short(value)));
      tip.append(entry);
    }
    if (many && at == null) tip.append("move over the chart: the nearest lines are named here");
  }

  function reset(u) {
    const xs = u.data[0];
    if (xs.length) u.setScale("x", { min: xs[0], max: xs[xs.length - 1] });
  }

  function onKey(event) {
    const u = charts.get(event.currentTarget);
    if (!u || !u.data[0].length || event.ctrlKey || event.altKey || event.metaKey) return;
    const xs = u.data[0], last = xs.length - 1;
    const scale = u.scales.x, width = scale.max - scale.min;
    let at = u.cursor.idx;
    const step = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
    switch (event.key) {
      case "ArrowRight": at = at == null ? 0 : Math.min(last, at + step); break;
      case "ArrowLeft": at = at == null ? last : Math.max(0, at - step); break;
      case "Home": at = 0; break;
      case "End": at = last; break;
      case "+": case "=": case "-": {
        const middle = at == null ? (scale.min + scale.max) / 2 : xs[at];
        const half = (event.key === "-" ? width * 2 : width / 2) / 2;
        u.setScale("x", { min: Math.max(xs[0], middle - half), max: Math.min(xs[last], middle + half) });
        event.preventDefault();
        return;
      }
      case "0": case "Escape": reset(u); return;
      default: return;
    }
    event.preventDefault();
    const x = xs[at];
    if (x < scale.min || x > scale.max) u.setScale("x", { min: x - width / 2, max: x + width / 2 });
    const ys = u.data.slice(1).map((each) => each[at]).find((y) => y != null);
    u.setCursor({ left: u.valToPos(x, "x"), top: ys == null ? u.over.clientHeight / 2 : u.valToPos(ys, "y") });
  }

  const elements = [...document.querySelectorAll(".chart")];
  const rebuild = () => { for (const element of charts.keys()) build(element); };
  const buildAll = () => { for (const element of elements) build(element); };

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !charts.has(entry.target)) build(entry.target);
    }
  }, { rootMargin: "300px" });
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const u = charts.get(target);
      if (u && target.clientWidth > 0 && u.width !== target.clientWidth) u.setSize({ width: target.clientWidth, height: HEIGHT });
    }
  });
  for (const element of elements) {
    watcher.observe(element);
    sizes.observe(element);
    element.addEventListener("keydown", onKey);
  }

  const on = (id, event, action) => {
    const element = document.getElementById(id);
    if (element) element.addEventListener(event, () => action(element));
  };
  on("axis", "change", (element) => { settings.axis = element.value; rebuild(); });
  on("log", "change", (element) => { settings.log = element.checked; rebuild(); });
  on("smooth", "input", (element) => { settings.smooth = Number(element.value); rebuild(); });
  on("reset", "click", () => { for (const u of charts.values()) reset(u); });
  for (const box of document.querySelectorAll("input[data-run]")) {
    box.addEventListener("change", () => {
      const run = Number(box.dataset.run);
      if (box.checked) settings.hidden.delete(run); else settings.hidden.add(run);
      rebuild();
    });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; buildAll(); });
  addEventListener("afterprint", () => { delete root.dataset.theme; rebuild(); });

  // A link to a run opens its part of the page.
  const openTarget = () => {
    const target = location.hash ? document.getElementById(location.hash.slice(1)) : null;
    if (target && target.tagName === "DETAILS") target.open = true;
  };
  addEventListener("hashchange", openTarget);
  openTarget();

  // A click at a heading sorts the rows; rows without a value come last.
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    const own = cell.dataset.value !== undefined ? cell : cell.querySelector("[data-value]");
    return own ? own.dataset.value : cell.textContent.trim();
  };
  const number = (text) => (text === "" ? NaN : Number(text.replace(/^(-?)inf$/, "$1Infinity")));
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = heading.textContent;
      heading.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows].map((row) => ({ row, text: valueOf(row, column) }));
        const isNumber = rows.every(({ text }) => text === "" || text.toLowerCase() === "nan" || !Number.isNaN(number(text)));
        const sign = down ? -1 : 1;
        rows.sort((a, b) => {
          if (!isNumber) return (a.text === "") - (b.text === "") || sign * a.text.localeCompare(b.text);
          const x = number(a.text), y = number(b.text);
          return Number.isNaN(x) - Number.isNaN(y) || sign * (x - y) || 0;
        });
        table.tBodies[0].append(...rows.map(({ row }) => row));
      });
    });
  }
})();
