// The page of candidates: a table, figures and one opened candidate, all drawn from `state`.

// Operations of a candidate, the longest, before it is asked for all of them.
const FEW_OPERATIONS = 20;
// A name has the same color on every page.
const COLORS = {
  gemm: "#4269d0", attention: "#6cc5b0", memory_bound: "#97bbf5",
  all_gather: "#efb118", reduce_scatter: "#ff725c", all_reduce: "#a463f2", all_to_all: "#ff8ab7", send_recv: "#9c6b4e",
  "forward pass": "#5b8e3e", "backward pass": "#2c6e8f", "exposed collectives": "#8f2d2d",
  compute: "#3ca951", optimizer: "#1d6f42", host: "#6e7781", bubble: "#b9bfc7", "exposed communication": "#8f2d2d",
  none: "#00798c", selective: "#7a9e2e", full: "#8d5a97",
  axonn: "#4c5fd7", "axonn-pipeline": "#2aa1c9", megatron: "#d17b0f", zero1: "#0f9b8e", zero2: "#6a4c2f", zero3: "#2f8f5b", zeropp: "#b94fa3", "zero-topo": "#7d7d38",
};
// Communication that is exposed on an axis has a warm color; neighbours in this list differ.
const EXPOSED = ["x", "y", "z", "data", "pipeline", "tensor", "context", "context*data", "shard", "replica", "secondary",
  "across", "weights", "gradients", "states", "other ranks"];
const WARM = ["#c94f4f", "#e9a23b", "#d6688f", "#8c5a3c", "#b5793a", "#f0b7a4"];

const gib = (value) => value.toFixed(1);

/** Columns of the table: title, value to sort by, text, and the words by which a filter names it. */
function columnsOf(data) {
  const several = data.strategies.length > 1;
  const some = (key, usual) => data.rows[key].some((value) => value !== usual);
  return [
    { title: "#", value: (row) => row.number, text: (row) => `${row.number + 1}` },
    several && { title: "Strategy", names: ["strategy"], isText: true, value: (row) => row.strategyName, text: (row) => row.markedName },
    { title: "Layout", names: ["layout"], isText: true, value: (row) => row.layout, text: (row) => brief(row.layout) },
    some("order", data.rows.order[0]) && { title: "Order", names: ["order"], isText: true, value: (row) => row.order },
    { title: "Step s", names: ["step"], value: (row) => row.step, text: (row) => seconds(row.step) },
    {
      title: "90 % interval", value: (row) => row.low ?? Infinity,
      text: (row) => (row.low === null ? "–" : `${seconds(row.low)}–${seconds(row.high)}`),
    },
    !several && {
      title: "P(best)", names: ["p"], value: (row) => row.p_best ?? -1,
      text: (row) => (row.p_best === null ? "–" : percent(row.p_best, 0)),
    },
    Object.keys(data.measured).length > 0 && {
      title: "Measured s", names: ["measured"], value: (row) => row.measured?.step ?? Infinity,
      text: (row) => (row.measured ? seconds(row.measured.step) : "–"),
    },
    some("n_virtual", 1) && { title: "Virtual", names: ["virtual"], value: (row) => row.n_virtual },
    some("global_batch", data.rows.global_batch[0])
      && { title: "Batch", names: ["batch"], value: (row) => row.global_batch },
    { title: "Micro-batch", names: ["mbs"], value: (row) => row.micro_batch },
    { title: "Recompute", names: ["recompute"], isText: true, value: (row) => row.recompute },
    { title: "TFLOP/s", names: ["tflops"], value: (row) => row.tflops, text: (row) => row.tflops.toFixed(1) },
    { title: "MFU", names: ["mfu"], value: (row) => row.mfu, text: (row) => percent(row.mfu) },
    {
      title: "Exposed", names: ["exposed"], value: (row) => row.exposed / row.step,
      text: (row) => percent(row.exposed / row.step),
    },
    some("bubble", 0) && {
      title: "Bubble", names: ["bubble"], value: (row) => row.bubble / row.step,
      text: (row) => percent(row.bubble / row.step),
    },
    {
      title: `GiB of ${data.capacity_gib.toFixed(0)}`, names: ["memory", "gib"],
      value: (row) => row.memory, text: (row) => `${gib(row.memory)} ${row.memory_mark}`,
    },
  ].filter(Boolean);
}

function rowsOf(data) {
  const columns = data.rows;
  return columns.layout.map((layout, number) => {
    const row = { number, layout, measured: data.measured[number], detail: data.details[number] };
    for (const [name, values] of Object.entries(columns)) {
      if (Array.isArray(values)) row[name] = values[number];
    }
    row.strategyName = data.strategies[row.strategy];
    row.markedName = data.marked[row.strategy];
    row.memoryTerms = Object.entries(columns.memory_terms).map(([term, of]) => ({ term, gib: of[number] }));
    row.sizes = Object.fromEntries(Object.entries(columns.axes).map(([axis, of]) => [axis, of[number]]));
    row.words = [row.strategyName, layout, row.order, row.recompute, row.fits ? "" : "oom"].join(" ").toLowerCase();
    return row;
  });
}

/** What the mark of a row's memory means. */
const MARKS = { "": "", tight: ": fits, or perhaps not", near: ": nearly fits", OOM: ": does not fit" };

const COMPARISONS = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b,
  ">=": (a, b) => a >= b, "=": (a, b) => a === b, "!=": (a, b) => a !== b,
};

/** The words of a filter's text: comparisons, which may have blanks around their sign, and others. */
const wordsOf = (text) => text.toLowerCase().replace(/\s*(<=|>=|!=|<|>|=)\s*/g, "$1").split(/\s+/).filter(Boolean);

/**
 * A test of rows for a filter's text, and what is wrong with the text. Words that are no comparison must appear in
 * the row.
 */
function testOf(text, columns, axes) {
  const problems = [];
  const tests = wordsOf(text).map((word) => {
    const [, name, sign, given] = /^([^<>=!]*)(<=|>=|!=|<|>|=)(.*)$/.exec(word) ?? [];
    if (!sign) return (row) => row.words.includes(word);
    const column = columns.find((each) => each.names?.includes(name));
    const axis = axes.find((each) => [each, `g${each}`, `g_${each}`].includes(name));
    if (!column && !axis) problems.push(`There is no "${name}" to compare.`);
    else if (column?.isText) {
      if (["=", "!="].includes(sign)) return (row) => COMPARISONS[sign](`${column.value(row)}`.toLowerCase(), given);
      problems.push(`"${name}" is a word: compare it with = or !=.`);
    } else if (given === "" || Number.isNaN(Number(given))) problems.push(`"${given}" is not a number.`);
    else if (axis) return (row) => row.sizes[axis] !== null && COMPARISONS[sign](row.sizes[axis], Number(given));
    else {
      const scale = ["p", "mfu", "exposed", "bubble"].includes(name) ? 100 : 1;
      return (row) => COMPARISONS[sign](scale * column.value(row), Number(given));
    }
    return () => true;
  });
  return { test: (row) => tests.every((test) => test(row)), problem: problems.join(" ") };
}

function compare(a, b) {
  if (typeof a === "string") return a.localeCompare(b, "en", { numeric: true });
  return a === b ? 0 : a < b ? -1 : 1;
}

class Page {
  constructor(data) {
    this.data = data;
    this.rows = rowsOf(data);
    this.columns = columnsOf(data);
    this.state = { sortedBy: this.columns[0], descending: false, page: 0, chosen: this.fromAddress() };
    this.visible = this.rows;
    // The same colours on every page of the table, and for every candidate.
    this.parts = orderedParts(this.rows.flatMap((row) => Object.keys(this.partsOf(row))));
    this.group = data.strategies.length > 1 ? "strategyName" : "recompute";
    this.groups = distinct(this.rows.map((row) => row[this.group])).sort();
  }

  /** The width left of a figure for the names of its rows, which is small on a phone. */
  margin(width, wanted) { return Math.min(wanted, Math.round(0.28 * width)); }

  fromAddress() {
    const number = Number(/^#candidate=(\d+)$/.exec(location.hash)?.[1] ?? 1) - 1;
    return this.rows[number] ?? this.rows[0];
  }

  start() {
    this.writeHead();
    this.makeTable();
    this.listen();
    $("main").hidden = false;
    this.update();
    this.open(this.state.chosen);
    this.drawMeasured();
    let width = document.body.clientWidth;
    new ResizeObserver(() => {
      if (document.body.clientWidth === width) return;
      width = document.body.clientWidth;
      clearTimeout(this.redrawing);
      this.redrawing = setTimeout(() => this.drawAll(), 150);
    }).observe(document.body);
  }

  writeHead() {
    const { data, rows } = this;
    $("h1").textContent = data.title;
    $("#subtitle").textContent = data.subtitle;
    const best = rows[0];
    const left = data.n_candidates - rows.length;
    $("#verdict").textContent = best.fits
      ? `Fastest: ${this.nameOf(best)}, ${seconds(best.step)} s a step`
        + (best.low === null ? "" : ` (90 % between ${seconds(best.low)} and ${seconds(best.high)})`)
        + `, ${best.tflops.toFixed(1)} TFLOP/s per GPU, MFU ${percent(best.mfu)}.`
      : "No candidate fits in a GPU's memory.";
    $("#remarks").replaceChildren(...data.remarks.map((text) => element("li", { textContent: text })));
    $("#assumptions").textContent = data.assumptions;
    const rejected = Object.entries(data.rejected)
      .filter(([, reasons]) => Object.keys(reasons).length)
      .map(([strategy, reasons]) => `Rejected of ${strategy}: `
        + `${Object.entries(reasons).map(([reason, count]) => `${count} ${reason}`).join("; ")}.`);
    const missing = left ? `; the ${left} slowest candidates are not in this page` : "";
    $("#rejected").textContent = [`${data.evaluated} configurations evaluated${missing}.`, ...rejected].join(" ");
    $("#written").textContent = data.written;
    const strategy = $("#strategy");
    strategy.append(element("option", { value: "", textContent: "all" }),
      ...data.strategies.map((name) => element("option", { textContent: name })));
    $("#strategy-tool").hidden = data.strategies.length < 2;
    const names = [...Object.keys(data.rows.axes), ...this.columns.flatMap((column) => column.names ?? [])];
    $("#filter-names").textContent = names.join(", ");
    if (rows.every((row) => !row.fits)) $("#hide-oom").checked = false;
  }

  nameOf(row) {
    const strategy = this.data.strategies.length > 1 ? `${row.markedName} ` : "";
    const virtual = row.n_virtual > 1 ? `, ${row.n_virtual} virtual stages` : "";
    return `${strategy}${row.layout}, micro-batch ${row.micro_batch}, recompute ${row.recompute}${virtual}`;
  }

  makeTable() {
    $("#table thead tr").append(...this.columns.map((column) => {
      const button = element("button", { type: "button", textContent: column.title });
      const head = element("th", { scope: "col", className: column.isText ? "text" : "" }, button);
      button.addEventListener("click", () => this.sortBy(column));
      column.head = head;
      return head;
    }));
  }

  listen() {
    for (const id of ["#filter", "#strategy", "#hide-oom", "#page-size"]) {
      $(id).addEventListener("input", () => { this.state.page = 0; this.update(); });
    }
    $("#previous").addEventListener("click", () => this.turn(-1));
    $("#next").addEventListener("click", () => this.turn(1));
    window.addEventListener("hashchange", () => this.open(this.fromAddress()));
    const body = $("#table tbody");
    body.addEventListener("click", (event) => {
      const line = event.target.closest("tr");
      if (line) this.choose(this.rows[line.dataset.number], line);
    });
    body.addEventListener("keydown", (event) => {
      const line = event.target.closest("tr");
      const next = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
      if (next) this.choose(this.rows[next.dataset.number], next);
      if (event.key === "Enter" || event.key === " ") {
        this.choose(this.rows[line.dataset.number], line);
        $("#detail").focus();
      }
      if (next || event.key === "Enter" || event.key === " ") event.preventDefault();
    });
  }

  sortBy(column) {
    const again = this.state.sortedBy === column;
    Object.assign(this.state, { sortedBy: column, descending: again && !this.state.descending, page: 0 });
    this.update();
  }

  turn(by) {
    this.state.page += by;
    this.update();
  }

  get pageSize() { return Number($("#page-size").value); }

  get shown() {
    const start = this.state.page * this.pageSize;
    return this.visible.slice(start, start + this.pageSize);
  }

  update() {
    const { sortedBy, descending } = this.state;
    const { test, problem } = testOf($("#filter").value, this.columns, Object.keys(this.data.rows.axes));
    $("#filter-problem").textContent = problem;
    const strategy = $("#strategy").value, hide = $("#hide-oom").checked;
    const sign = descending ? -1 : 1;
    this.visible = this.rows
      .filter((row) => (row.fits || !hide) && (!strategy || row.strategyName === strategy) && test(row))
      .sort((a, b) => sign * compare(sortedBy.value(a), sortedBy.value(b)) || a.number - b.number);
    for (const column of this.columns) {
      if (column !== sortedBy) column.head.removeAttribute("aria-sort");
      else column.head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    }
    this.fillTable();
    this.drawTradeoff();
    this.drawBreakdown();
  }

  fillTable() {
    const shown = this.shown, first = this.state.page * this.pageSize;
    $("#table tbody").replaceChildren(...shown.map((row) => {
      const line = element("tr", { tabIndex: -1 }, ...this.columns.map((column) => element("td", {
        textContent: column.text ? column.text(row) : `${column.value(row)}`,
        className: column.isText ? "text" : row.fits ? "" : "oom",
      })));
      line.dataset.number = row.number;
      return line;
    }));
    this.markChosen();
    $("#count").textContent = shown.length
      ? `${first + 1}–${first + shown.length} of ${this.visible.length} candidates`
      : "No candidate passes the filter.";
    $("#previous").disabled = first === 0;
    $("#next").disabled = first + shown.length >= this.visible.length;
  }

  /** One line of the table can be reached with the tabulator key, the arrows move from there. */
  markChosen() {
    const lines = [...document.querySelectorAll("#table tbody tr")];
    for (const line of lines) {
      const isChosen = Number(line.dataset.number) === this.state.chosen.number;
      line.setAttribute("aria-selected", isChosen);
      line.tabIndex = isChosen ? 0 : -1;
    }
    if (lines.length && !lines.some((line) => line.tabIndex === 0)) lines[0].tabIndex = 0;
  }

  choose(row, line) {
    history.replaceState(null, "", `#candidate=${row.number + 1}`);
    this.open(row);
    line?.focus();
  }

  open(row) {
    this.state.chosen = row;
    this.markChosen();
    $("#detail-title").textContent = `Candidate ${row.number + 1}: ${this.nameOf(row)}`;
    const facts = [
      ["Step", `${seconds(row.step)} s`],
      row.low !== null && ["90 % interval", `${seconds(row.low)} to ${seconds(row.high)} s`],
      row.p_best !== null && this.data.strategies.length === 1 && ["Chance to be the fastest", percent(row.p_best, 0)],
      row.measured && ["Measured", `${seconds(row.measured.step)} s (predicted there ${seconds(row.measured.predicted)} s)`],
      ["Compute", `${seconds(row.compute)} s`],
      ["Exposed communication", `${seconds(row.exposed)} s`],
      row.bubble > 0 && ["Pipeline bubble", `${seconds(row.bubble)} s`],
      ["Micro-steps", `${row.n_microsteps}`],
      ["TFLOP/s per GPU", row.tflops.toFixed(1)],
      ["MFU, HFU", `${percent(row.mfu)}, ${percent(row.hfu)}`],
      ["Memory", `${gib(row.memory)} of ${gib(this.data.capacity_gib)} GiB${MARKS[row.memory_mark]}`],
      ["90 % interval of memory", `${gib(row.memory_low)} to ${gib(row.memory_high)} GiB`],
    ].filter(Boolean);
    $("#summary").replaceChildren(...facts.map(([name, value]) =>
      element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
    this.writeCommands(row);
    const missing = $("#undetailed");
    missing.hidden = Boolean(row.detail);
    missing.textContent = "This page holds the timelines and operations of the fastest candidates and of the "
      + "Pareto front only; the command explain shows those of this one.";
    for (const part of ["#operations", "#timeline", "#passes"]) $(part).hidden = !row.detail;
    if (row.detail) this.writeOperations(row.detail);
    this.drawDetail();
    this.drawTradeoff();
  }

  writeCommands(row) {
    const strategy = row.strategyName === "axonn" ? "" : ` --strategy ${row.strategyName}`;
    const order = row.order === "xyzd" ? "" : ` --order ${row.order}`;
    const virtual = row.n_virtual > 1 ? ` --virtual-stages ${row.n_virtual}` : "";
    const batch = this.data.names_batch ? ` --global-batch ${row.global_batch}` : "";
    const what = `${this.data.options}${batch}${strategy} --grid ${row.layout}${order} --micro-batch ${row.micro_batch}`
      + ` --recompute ${row.recompute}${virtual}`;
    const commands = [
      this.data.launched.includes(row.strategyName) && ["Write its job script", `axonn-tune launch ${what}`],
      ["Explain it", `axonn-tune explain ${what}`],
      ["Write its step for Perfetto", `axonn-tune trace ${what} --output trace.json`],
    ].filter(Boolean);
    $("#commands").replaceChildren(element("h3", { textContent: "Commands" }), ...commands.map(([title, text]) => {
      const code = element("pre", { textContent: text, tabIndex: 0 });
      const copy = element("button", { type: "button", textContent: "Copy", ariaLabel: `Copy: ${title}` });
      copy.addEventListener("click", async () => {
        getSelection().selectAllChildren(code);
        await navigator.clipboard?.writeText(text).catch(() => document.execCommand("copy"));
        copy.textContent = "Copied";
        setTimeout(() => { copy.textContent = "Copy"; }, 1500);
      });
      return element("div", {}, element("p", { textContent: title }), element("div", { className: "command" }, code, copy));
    }));
  }

  writeOperations(detail) {
    const titles = ["Operation", "Kind", "Axis", "Size", "Calls", "Total s", "Exposed s", "Rate", "Bound by"];
    const isText = [1, 1, 1, 1, 0, 0, 0, 0, 1];
    const cell = (tag, content, place) =>
      element(tag, { textContent: content, className: isText[place] ? "text" : "", ...(tag === "th" && { scope: "col" }) });
    $("#operations thead tr").replaceChildren(...titles.map((title, place) => cell("th", title, place)));
    const all = $("#all-operations");
    all.hidden = detail.operations.length <= FEW_OPERATIONS;
    all.textContent = `Show all ${detail.operations.length} operations`;
    all.onclick = () => { all.hidden = true; this.listOperations(detail.operations, cell); };
    this.listOperations(detail.operations.slice(0, FEW_OPERATIONS), cell);
  }

  listOperations(operations, cell) {
    $("#operations tbody").replaceChildren(...operations.map((operation) => element("tr", {},
      ...operation.map((value, place) => cell("td", value === null || value === "" ? "–"
        : place === 5 || place === 6 ? value.toPrecision(4) : value, place)))));
  }

  drawAll() {
    this.drawTradeoff();
    this.drawBreakdown();
    this.drawDetail();
    this.drawMeasured();
  }

  drawTradeoff() {
    const { data, visible, state } = this;
    const isShown = new Set(visible);
    // Steps of different batches are compared by the time of a sequence.
    const compared = new Set(data.rows.global_batch).size > 1
      ? { label: "step over global batch, s", time: (row) => row.step / row.global_batch }
      : { label: "step, s", time: (row) => row.step };
    const front = data.front.map((number) => this.rows[number]).filter((row) => isShown.has(row));
    draw("#tradeoff .plot", "Step time against memory of the candidates", (width) => ({
      width, height: 380, marginLeft: 50, grid: true,
      x: { type: "log", label: "memory of one GPU, GiB →", tickFormat: (value) => d3.format("~g")(value) },
      y: { type: "log", label: `↑ ${compared.label}`, tickFormat: (value) => d3.format("~g")(value) },
      color: { ...colors(this.groups), legend: true },
      marks: visible.length ? [
        Plot.ruleX([data.capacity_gib], { strokeDasharray: "4 4" }),
        Plot.line(front, { x: "memory", y: compared.time, curve: "step-after", strokeOpacity: 0.6 }),
        Plot.dot(visible, {
          x: "memory", y: compared.time, r: 2.5, fill: this.group, fillOpacity: 0.7,
        }),
        Plot.dot(isShown.has(state.chosen) ? [state.chosen] : [], { x: "memory", y: compared.time, r: 8, strokeWidth: 2.5 }),
        Plot.tip(visible, Plot.pointer({ x: "memory", y: compared.time, maxRadius: 30, title: (row) => this.tipOf(row) })),
      ] : [],
    }), (plot) => this.openOnClick(plot, (row) => row));
  }

  tipOf(row) {
    return `${row.number + 1}: ${this.nameOf(row)}\n${seconds(row.step)} s, ${gib(row.memory)} GiB, MFU ${percent(row.mfu)}`;
  }

  openOnClick(plot, rowOf) {
    plot.addEventListener("click", () => {
      if (!plot.value) return;
      this.choose(rowOf(plot.value));
      $("#detail").scrollIntoView({ block: "nearest" });
    });
    plot.style.cursor = "pointer";
  }

  drawBreakdown() {
    const parts = this.shown.flatMap((row) => Object.entries(this.partsOf(row)).map(([part, value]) =>
      ({ row, name: barName(row), part, value })));
    const order = this.parts.filter((part) => parts.some((each) => each.part === part));
    draw("#breakdown .plot", "Parts of the step of each candidate shown in the table", (width) => ({
      width, height: 70 + 24 * Math.max(this.shown.length, 4), marginLeft: this.margin(width, 130),
      x: { label: "step, s →", grid: true },
      y: {
        label: null, domain: this.shown.map(barName),
        tickFormat: (name) => clipped(name, Math.round(this.margin(width, 130) / 6)),
      },
      color: { ...colors(order), legend: true },
      marks: parts.length ? [
        Plot.barX(parts, { x: "value", y: "name", fill: "part", order, insetTop: 1, insetBottom: 1 }),
        Plot.ruleY(this.shown.filter((row) => row.low !== null), { x1: "low", x2: "high", y: barName }),
        Plot.tip(parts, Plot.pointerY(Plot.stackX({
          x: "value", y: "name", z: "part", order,
          title: (each) => `${this.tipOf(each.row)}\n${each.part}: ${seconds(each.value)} s`,
        }))),
      ] : [],
    }), (plot) => this.openOnClick(plot, (part) => part.row));
  }

  /**
   * Exposed communication is not told apart by axis where a row has no detail, or strategies have axes of their own.
   */
  partsOf(row) {
    if (row.detail && this.data.strategies.length === 1) return row.detail.parts;
    const parts = { compute: row.compute, "exposed communication": row.exposed, bubble: row.bubble };
    return Object.fromEntries(Object.entries(parts).filter(([, value]) => value > 0));
  }

  drawDetail() {
    const row = this.state.chosen;
    if (row.detail) this.drawTimelines(row);
    const terms = row.memoryTerms.filter((term) => term.gib > 0);
    draw("#memory .plot", "Terms of the memory of one GPU", (width) => ({
      width, height: 60 + 24 * terms.length, marginLeft: this.margin(width, 150),
      x: { label: "GiB →", grid: true, domain: [0, Math.max(this.data.capacity_gib, row.memory)] },
      y: {
        label: null, domain: terms.map((each) => each.term),
        tickFormat: (term) => clipped(term, Math.round(this.margin(width, 150) / 6)),
      },
      marks: [
        Plot.barX(terms, { ...stacked(terms), y: "term", fill: "#4269d0", insetTop: 2, insetBottom: 2 }),
        Plot.text(terms, { x: (_, i) => stacked(terms).x2[i], y: "term", text: (each) => gib(each.gib), dx: 4, textAnchor: "start" }),
        Plot.ruleX([this.data.capacity_gib], { strokeDasharray: "4 4" }),
      ],
    }));
  }

  drawTimelines(row) {
    const { timeline, passes } = row.detail;
    $("#timeline-note").textContent = `Predicted: one of ${row.n_microsteps} micro-steps`
      + (row.sizes.pipeline > 1 ? " of a rank of the last stage" : "")
      + `, with ${this.data.drawn_layers} of the equal layers in a row drawn, and the end of the step; one row for `
      + "computation, one for each axis of communication.";
    this.drawTimeline("#timeline .plot", "Operations of a micro-step over time, a row for each stream", timeline);
    $("#passes").hidden = !(row.sizes.pipeline > 1);
    $("#passes .plot").hidden = !passes;
    $("#passes-note").textContent = passes
      ? `The passes of ${passes.n_microbatches} of ${row.n_microsteps} micro-batches, a row for each rank; the gaps are the bubble.`
      : "Its passes are too many to draw here; the command trace writes them for Perfetto.";
    if (passes) this.drawTimeline("#passes .plot", "Passes of the pipeline over time, a row for each rank", passes);
  }

  drawTimeline(selector, label, packed) {
    const scale = 1e6 * packed.tick;
    const [unit, factor] = scale < 1e-3 ? ["us", 1e6] : scale < 1 ? ["ms", 1e3] : ["s", 1];
    const free = packed.streams.map(() => 0);
    const operations = packed.operations.map(([stream, name, kind, idle, length]) => {
      const start = free[stream] + idle;
      free[stream] = start + length;
      return {
        stream: packed.streams[stream], name: packed.names[name], kind: packed.kinds[kind],
        start: start * packed.tick * factor, end: free[stream] * packed.tick * factor,
      };
    });
    draw(selector, label, (width) => ({
      width, height: 90 + Math.max(42 - packed.streams.length, 14) * packed.streams.length, marginLeft: this.margin(width, 150),
      x: { label: `${unit} →`, grid: true },
      y: { label: null, domain: packed.streams },
      color: { ...colors(packed.kinds), legend: true },
      marks: [
        Plot.barX(operations, { x1: "start", x2: "end", y: "stream", fill: "kind", stroke: "var(--ground)", strokeWidth: 0.3 }),
        Plot.tip(operations, Plot.pointer({
          x: (each) => (each.start + each.end) / 2, y: "stream", maxRadius: 60,
          title: (each) => `${each.name} (${each.kind})\n${each.start.toPrecision(4)} to ${each.end.toPrecision(4)} ${unit}`,
        })),
      ],
    }));
  }

  drawMeasured() {
    const measured = this.rows.filter((row) => row.measured);
    $("#measured").hidden = !measured.length;
    if (!measured.length) return;
    const points = measured.map((row) => ({
      row, name: this.nameOf(row), measured: row.measured.step, predicted: row.measured.predicted,
      low: row.measured.low, high: row.measured.high,
    }));
    drawBeside("#measured .plot", points, (plot) => this.openOnClick(plot, (point) => point.row));
  }
}

/** Computation first, then what is exposed, the bubble last. */
function orderedParts(parts) {
  const rank = (part) => (part.startsWith("exposed") ? 3 : { compute: 0, optimizer: 1, host: 2, bubble: 4 }[part]);
  return distinct(parts).sort((a, b) => rank(a) - rank(b));
}

/** A color scale of the names that are shown, each with its color. */
function colors(shown) {
  return { domain: shown, range: shown.map(colorOf) };
}

function colorOf(name) {
  const axis = name.startsWith("exposed, ") ? EXPOSED.indexOf(name.slice(9)) : -1;
  return axis >= 0 ? WARM[axis % WARM.length] : COLORS[name] ?? "#8a8f98";
}

/** A layout without the axes of size 1, unless it has no others. */
const brief = (layout) => layout.split(",").filter((part) => !part.endsWith("=1")).join(",") || layout;

/** Short: axes by their first letters. */
const barName = (row) => `${row.number + 1}: ${row.layout.replace(/([a-z])[a-z]*=/g, "$1")}`;
const clipped = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

function stacked(terms) {
  const x2 = d3.cumsum(terms, (each) => each.gib);
  return { x1: d3.map(x2, (end, i) => end - terms[i].gib), x2 };
}

start((data) => new Page(data).start());
