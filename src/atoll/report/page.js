(() => {
  "use strict";
  // Light or dark: follow the system until the reader chooses.
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`); };
  const store = (value) => { try { if (value) localStorage.setItem("atoll-theme", value); return localStorage.getItem("atoll-theme"); } catch { return null; } };
  const before = store();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  button.hidden = false;
  button.onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; store(root.dataset.theme); name(); };
  system.addEventListener("change", name);
  name();

  const make = (tag, cls) => { const e = document.createElement(tag); e.className = cls; return e; };
  const beside = (tip, x, width) => {
    const right = x < width / 2;
    tip.style.left = right ? `${x + 12}px` : "auto";
    tip.style.right = right ? "auto" : `${width - x + 12}px`;
  };

  // Charts: a line and the values of all methods at the round under the pointer or arrow keys.
  for (const area of document.querySelectorAll(".area")) {
    const lines = JSON.parse(area.querySelector("script").textContent);
    const [left, right] = area.dataset.range.split(" ").map(Number);
    const marks = lines.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
    const cross = make("div", "cross"), tip = make("div", "tip");
    let at = -1;
    tip.setAttribute("role", "status");
    area.tabIndex = 0;
    area.setAttribute("role", "group");
    area.setAttribute("aria-label", `${area.querySelector("svg").getAttribute("aria-label")} Arrow keys read values.`);
    const nearest = (xs, x) => { let best = 0; xs.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(xs[best] - x)) best = i; }); return best; };
    const show = (x) => {
      const width = area.clientWidth, px = (x - left) / ((right - left) || 1) * width;
      cross.style.left = `${px}px`;
      const table = document.createElement("table"), rows = [];
      for (const line of lines) {
        if (x > line.x[line.x.length - 1] * 1.001) continue;
        const i = nearest(line.x, x);
        if (line.y[i] !== null) rows.push([line, i]);
      }
      rows.sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]);
      for (const [line, i] of rows.slice(0, 16)) {
        const row = table.insertRow(), head = make("th", line.c), value = row.appendChild(head) && row.insertCell();
        head.textContent = line.n;
        value.textContent = `${line.y[i].toFixed(1)}${area.dataset.unit}` + (line.l[i] < line.h[i] ? ` (${line.l[i].toFixed(1)}–${line.h[i].toFixed(1)})` : "");
      }
      const head = make("b", "");
      head.textContent = `${area.dataset.x.split(" ")[0]} ${x}`;
      tip.replaceChildren(head, table);
      area.append(cross, tip);
      beside(tip, px, width);
    };
    const hide = () => { cross.remove(); tip.remove(); at = -1; };
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      at = nearest(marks, left + (event.clientX - box.left) / box.width * (right - left));
      show(marks[at]);
    });
    area.addEventListener("pointerleave", hide);
    area.addEventListener("blur", hide);
    area.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      at = Math.max(0, Math.min(marks.length - 1, (at < 0 ? marks.length - 1 : at) + step));
      show(marks[at]);
    });
  }

  // Large matrices: show the cell under the pointer.
  for (const picture of document.querySelectorAll(".picture")) {
    const values = JSON.parse(picture.querySelector("script").textContent), tip = make("div", "tip");
    picture.addEventListener("pointermove", (event) => {
      const box = picture.querySelector("svg").getBoundingClientRect();
      const r = Math.floor((event.clientY - box.top) / box.height * values.length);
      const c = Math.floor((event.clientX - box.left) / box.width * values[0].length);
      if (!values[r] || values[r][c] === undefined) return;
      tip.textContent = `${picture.dataset.rows} ${r}, ${picture.dataset.columns} ${c}: ${values[r][c] ?? "–"}`;
      tip.style.top = `${event.clientY - box.top + 14}px`;
      picture.append(tip);
      beside(tip, event.clientX - box.left, box.width);
    });
    picture.addEventListener("pointerleave", () => tip.remove());
  }

  // A link to a section of the hidden page shows that page.
  const follow = () => {
    const section = document.getElementById(location.hash.slice(1))?.closest("section");
    if (section) document.getElementById(section.className === "technical" ? "technical-page" : "summary-page").checked = true;
    section?.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  follow();

  // Print collapsed parts, too.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.dataset.was = d.open; d.open = true; }));
  addEventListener("afterprint", () => document.querySelectorAll("details").forEach((d) => { d.open = d.dataset.was === "true"; }));
})();
