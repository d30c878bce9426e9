// Tables inside of <div class="sortable"> are sorted by a click, or Enter, on a heading.
document.querySelectorAll(".sortable table").forEach((table) => {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim().replace("−", "-").replace(/^< /, "");
    const number = parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  // Numbers come before words: a dash or "diverged" stays below every number.
  const order = (a, b) =>
    typeof a === typeof b ? (typeof a === "number" ? a - b : a.localeCompare(b)) : 0;
  const sort = (head, column) => {
    const down = head.ariaSort === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.ariaSort = down ? "descending" : "ascending";
    const rows = [...body.rows].map((row) => [value(row, column), row]);
    rows.sort(([a], [b]) => (typeof a === "string") - (typeof b === "string") || (down ? order(b, a) : order(a, b)));
    body.append(...rows.map(([, row]) => row));
  };
  heads.forEach((head, column) => {
    head.tabIndex = 0;
    head.title = "Sort";
    head.addEventListener("click", () => sort(head, column));
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort(head, column));
  });
});

// The Tab key reaches tables, code and pictures that scroll sideways, so that arrow keys scroll them.
const regions = ".md-typeset__scrollwrap, .md-content :is(pre > code, p:has(> img))";
const reach = () => document.querySelectorAll(regions).forEach((region) => {
  const scrolls = region.scrollWidth > region.clientWidth;
  region.toggleAttribute("tabindex", scrolls);
  if (!scrolls) return;
  region.tabIndex = 0;
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", { code: "Code", p: "Picture" }[region.localName] ?? "Table");
});
["load", "resize"].forEach((event) => addEventListener(event, reach));
