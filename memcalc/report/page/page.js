"use strict";
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  document.documentElement.classList.add("js");
  const status = document.getElementById("status");
  let clearing = 0;
  const say = (text) => {
    status.textContent = text;
    clearTimeout(clearing);
    clearing = setTimeout(() => { status.textContent = ""; }, 2500);
  };

  // ---------------------------------------------------------------------------------------------------- copying
  const byCommand = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    area.style.cssText = "position:fixed;top:0;left:0;opacity:0";
    document.body.append(area);
    area.select();
    let done = false;
    try { done = document.execCommand("copy"); } catch { done = false; }
    area.remove();
    return done;
  };
  const select = (element) => {
    for (let box = element.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    const range = document.createRange();
    range.selectNodeContents(element);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  };
  const copy = async (element, button) => {
    const text = element.textContent;
    let done = false;
    try { await navigator.clipboard.writeText(text); done = true; } catch { done = byCommand(text); }
    button.focus();
    if (done) { say("Copied."); return; }
    select(element);
    say("Selected: press Ctrl+C or ⌘C.");
  };
  for (const button of all("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", () => copy(document.getElementById(button.dataset.copies), button));
  }

  // ------------------------------------------------------------------------------------------------------ terms
  const shut = (except) => { for (const term of all(".term.open")) if (term !== except) term.classList.remove("open"); };
  for (const button of all(".term-name")) {
    const term = button.parentElement;
    button.addEventListener("click", () => { shut(term); term.classList.toggle("open"); document.body.classList.remove("quiet"); });
  }
  document.addEventListener("click", (event) => { if (!event.target.closest(".term")) shut(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { shut(); document.body.classList.add("quiet"); }
  });
  for (const kind of ["focusin", "pointerover"]) {
    document.addEventListener(kind, (event) => {
      if (event.target.closest(".term")) return;
      document.body.classList.remove("quiet");
    });
  }

  // ------------------------------------------------------------------------------------------------------ plans
  const PARTS = '[data-part^="plan-"], [data-part^="close-"]';
  const rankOf = (part) => part.dataset.part.split("-")[1];
  const plans = new Map(all("details.plan[data-plan]").map((plan) => [plan.dataset.plan, plan]));
  const choose = (rank, moving = true) => {
    const chosen = plans.get(rank);
    if (!chosen) return;
    for (const [name, plan] of plans) {
      plan.open = name === rank;
      plan.classList.toggle("chosen", name === rank);
    }
    for (const row of all("tr[data-plan]")) row.classList.toggle("chosen", row.dataset.plan === rank);
    for (const part of all(PARTS)) part.classList.toggle("chosen", rankOf(part) === rank);
    if (!moving) return;
    const summary = chosen.querySelector("summary");
    summary.focus({ preventScroll: true });
    chosen.scrollIntoView({ block: "nearest" });
  };
  const shown = [...plans.values()].find((plan) => plan.open);
  if (shown) choose(shown.dataset.plan, false);
  for (const row of all("tr[data-plan]")) {
    row.addEventListener("click", (event) => {
      event.preventDefault();
      choose(row.dataset.plan);
    });
  }
  const REACH = 24; // pixels: a point is smaller than a finger
  const nearestPart = (parts, event) => {
    const away = (part) => {
      const box = part.getBoundingClientRect();
      return Math.hypot((box.left + box.right) / 2 - event.clientX, (box.top + box.bottom) / 2 - event.clientY);
    };
    const [first] = parts.map((part) => [away(part), part]).sort((a, b) => a[0] - b[0]);
    return first && first[0] <= REACH ? first[1] : null;
  };
  for (const drawing of all("svg.memcalc-chart")) {
    const parts = all(PARTS, drawing);
    if (!parts.length) continue;
    drawing.setAttribute("role", "group");
    drawing.addEventListener("click", (event) => {
      const part = nearestPart(parts, event);
      if (part) choose(rankOf(part));
    });
    for (const part of parts.filter((one) => one.dataset.part.startsWith("plan-"))) {
      const title = part.querySelector("title");
      part.setAttribute("role", "link");
      part.setAttribute("tabindex", "0");
      part.setAttribute("aria-label", title ? title.textContent : `plan ${rankOf(part)}`);
      part.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(rankOf(part)); }
      });
    }
  }

  // ---------------------------------------------------------------------------------------------------- sorting
  const keyOf = (row, place) => {
    const cell = row.cells[place];
    const text = cell.dataset.sort ?? cell.textContent.trim();
    const number = Number.parseFloat(text.replace(/^#/, ""));
    return Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const table of all("table.sortable")) {
    all("thead th", table).forEach((head, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      const title = document.createElement("span");
      while (head.firstChild && head.firstChild.nodeType === Node.TEXT_NODE) title.append(head.firstChild);
      button.append(title, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = [...body.rows].sort((a, b) => compare(keyOf(a, place), keyOf(b, place)) * (down ? -1 : 1));
        body.append(...rows);
      });
    });
  }

  // --------------------------------------------------------------------------------------------------- printing
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    for (const box of closed) box.open = true;
  });
  addEventListener("afterprint", () => { for (const box of closed) box.open = false; closed = []; });
})();
