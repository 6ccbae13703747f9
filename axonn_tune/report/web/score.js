// The page of a score: its sentences, predicted over measured steps, and tables that can be sorted.

/** A table whose heads sort it: numbers by their size, words by the alphabet. */
function sortable({ title, headers, rows }) {
  const body = element("tbody");
  const isText = headers.map((_, column) => rows.some((row) => Number.isNaN(Number(row[column])) && row[column] !== "-"));
  const value = (row, column) => (isText[column] ? row[column] : row[column] === "-" ? -Infinity : Number(row[column]));
  const cell = (text, column) => element("td", { textContent: text, className: isText[column] ? "text" : "" });
  const fill = (sorted) => body.replaceChildren(...sorted.map((row) => element("tr", {}, ...row.map(cell))));
  const heads = headers.map((name, column) => {
    const head = element("th", { scope: "col", className: isText[column] ? "text" : "" });
    head.append(element("button", {
      type: "button", textContent: name,
      onclick: () => {
        const isAgain = head.getAttribute("aria-sort") === "descending";
        for (const each of heads) each.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", isAgain ? "ascending" : "descending");
        const order = isAgain ? d3.ascending : d3.descending;
        fill(d3.sort(rows, (a, b) => order(value(a, column), value(b, column))));
      },
    }));
    return head;
  });
  fill(rows);
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body);
  return element("section", {}, element("h2", { textContent: title }), element("div", { className: "scroll" }, table));
}

start((data) => {
  $("h1").textContent = data.title;
  $("#sentences").append(...data.sentences.map((text) => element("p", { textContent: text })));
  $("#tables").append(...data.tables.map(sortable));
  $("#written").textContent = data.written;
  $("main").hidden = false;
  $("#steps").hidden = !data.runs.length;
  if (data.runs.length) drawBeside("#steps .plot", data.runs.map((run) => ({ ...run, low: run.measured, high: run.measured })));
});
