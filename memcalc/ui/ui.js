"use strict";
(() => {
  // The job is what stands behind # in the address: options as on the command line; `pin` is the job to compare with.
  const REST = 600; // ms without a change before plans are looked for
  const KEPT = 600; // answers that are remembered
  const AROUND = 12; // values of a control that are asked for ahead
  const START = "model=llama-2-7b&gpu=a100-40g&gpus=8&seq-len=4096&zero=3&recompute=full";
  const byId = id => document.getElementById(id);
  const all = query => [...document.querySelectorAll(query)];
  const answers = new Map();
  const plans = new Map();
  let job = new URLSearchParams();
  let pin = "";
  let shown = null; // the answer on the screen
  let since = 0; // when the control moved that is being answered
  let busy = false;
  let standing = null; // the answer that is on its way
  let resting = 0;
  let written = 0;
  let slow = null; // what cancels requests that wait for rest
  let spoken = 0;
  let scout = 0; // which look ahead is the latest
  let scouting = false;

  // Asking
  async function ask(request, text, signal) {
    let response;
    try {
      response = await fetch(`/api/${request}`, {method: "POST", body: text, signal});
    } catch (error) {
      if (error.name === "AbortError") throw error;
      const options = [...job].map(([name, value]) => `--${name} '${value.replaceAll("'", "'\\''")}'`).join(" ");
      throw {message: `memcalc ui stopped. Start it again with: memcalc ui ${options}`, field: ""};
    }
    if (response.ok) return response;
    throw await response.json().catch(() => ({message: `The server answered ${response.status}.`, field: ""}));
  }

  function begun(text) {
    return text.charAt(0).toUpperCase() + text.slice(1);
  }

  async function asked(request, text, signal) {
    return (await ask(request, text, signal)).json();
  }

  function remember(link, answer) {
    answers.delete(link);
    answers.set(link, answer);
    if (answers.size > KEPT) answers.delete(answers.keys().next().value);
  }

  // What is on the screen follows the job: at once where the answer is known, else as soon as it comes; one question
  // is on its way at a time, and always the latest.
  async function follow() {
    const link = job.toString();
    if (answers.has(link)) return render(answers.get(link), link);
    if (busy) return standing;
    busy = true;
    standing = arrive(link);
    return standing;
  }

  async function arrive(link) {
    const late = setTimeout(() => document.querySelector(".now").classList.add("stale"), 300);
    try {
      remember(link, await asked("estimate", link));
    } catch (problem) {
      if (link === job.toString()) refuse(problem);
      busy = false;
      clearTimeout(late);
      if (link !== job.toString()) follow();
      return undefined;
    }
    clearTimeout(late);
    busy = false;
    return follow();
  }

  // Showing
  // A command's options, each with its value, between which alone its row ends.
  function options(command) {
    return command.split(" --").flatMap((text, index) => {
      const part = document.createElement("span");
      part.className = "word";
      part.textContent = index ? `--${text}` : text;
      return index ? [" ", part] : [part];
    });
  }

  function render(answer, link) {
    clear();
    if (shown !== answer) {
      swap(byId("verdict"), answer.head);
      moveBar(answer.bar);
      swap(byId("speed"), answer.speed);
      swap(byId("warnings"), answer.warnings);
      byId("command").replaceChildren(...options(answer.command));
      byId("assumed").replaceChildren(...Object.entries(answer.assumed).map(([name, value]) => fact(name, value)));
      byId("fit").hidden = answer.verdict !== "does-not-fit";
      document.title = `${answer.sentence} – memcalc`;
      shown = answer;
      hint(answer.assumed);
      say(answer.sentence);
    }
    document.body.dataset.shows = link;
    if (since) {
      performance.measure("memcalc-bar", {start: since, end: performance.now()});
      since = 0;
    }
  }

  // The bar is changed in place, so that its parts move rather than jump.
  function moveBar(html) {
    const box = byId("bar"), fresh = document.createElement("div");
    fresh.innerHTML = html;
    const now = box.querySelectorAll(".stack, .stack span, .limit, .range");
    const next = fresh.querySelectorAll(".stack, .stack span, .limit, .range");
    if (!now.length || now.length !== next.length) return box.replaceChildren(...fresh.childNodes);
    next.forEach((part, index) => {
      for (const name of ["style", "title", "class"]) {
        if (part.hasAttribute(name)) now[index].setAttribute(name, part.getAttribute(name));
      }
    });
    box.querySelector(".limit span").textContent = fresh.querySelector(".limit span").textContent;
    for (const query of ["figcaption", ".legend"]) box.querySelector(query).replaceWith(fresh.querySelector(query));
    return undefined;
  }

  function swap(box, html) {
    if (box.innerHTML !== html) box.innerHTML = html;
  }

  function fact(name, value) {
    const row = document.createElement("div"), term = document.createElement("dt"), says = document.createElement("dd");
    term.textContent = name;
    says.textContent = value;
    row.append(term, says);
    return row;
  }

  // At most once a second, and the last one always.
  function say(sentence) {
    clearTimeout(spoken);
    spoken = setTimeout(() => { byId("live").textContent = sentence; }, 1000);
  }

  // The bar and the command stay those of the last answer, and say so, while the job in the controls has none.
  function outdate(stale) {
    for (const box of all(".now, footer .code")) box.classList.toggle("stale", stale);
    byId("copy-command").disabled = stale;
  }

  function clear() {
    outdate(false);
    byId("message").textContent = "";
    for (const box of all(".problem")) box.textContent = "";
    for (const field of all("[aria-invalid]")) field.removeAttribute("aria-invalid");
  }

  function refuse(problem) {
    clear();
    outdate(true);
    shown = null;
    since = 0;
    document.body.dataset.shows = job.toString();
    const name = (problem.field || "").split(": ").pop().replaceAll("_", "-");
    const box = (document.body.dataset.kind === "roles" && byId(`e-r-${name}`)) || byId(`e-${name}`);
    for (const field of all(`[data-option="${CSS.escape(name)}"]`)) field.setAttribute("aria-invalid", "true");
    byId("message").textContent = problem.message;
    if (box) box.textContent = problem.message;
  }

  // Controls
  function fill() {
    document.body.dataset.kind = job.get("algorithm") ? "roles" : "training";
    for (const field of all("[data-option]").filter(there)) {
      const name = field.dataset.option, value = job.get(name) ?? "";
      if (field.type === "radio") field.checked = field.value === value;
      else if (field.type === "checkbox") field.checked = value.split(",").includes(field.value);
      else if (name === "set") field.value = job.getAll("set").join(" ");
      else if (name === "model" && job.has("config")) field.value = "";
      else if (field !== document.activeElement || field.value.trim() !== value) choose(field, value);
    }
    if (document.activeElement !== byId("paste")) byId("paste").value = job.get("config") ?? "";
    byId("o-model").placeholder = job.has("config") ? "pasted config.json" : "name, or owner/name of the Hub";
    for (const slider of all("[data-slides]")) place(slider, job.get(slider.dataset.slides));
    byId("report").href = `/api/report?${job}`;
    byId("difference").hidden = !pin;
    byId("compare").setAttribute("aria-pressed", String(Boolean(pin)));
    byId("compare").textContent = pin ? "Stop comparing" : "Compare";
  }

  // Whether a control is one of the kind of job that is on the page.
  function there(field) {
    const only = field.closest(".only-roles, .only-training");
    return !only || only.classList.contains(`only-${document.body.dataset.kind}`);
  }

  // A value that a list does not have is shown in it all the same: nothing that the address says is dropped.
  function choose(field, value) {
    if (field.tagName === "SELECT" && ![...field.options].some(option => option.value === value)) {
      field.append(new Option(value || "auto", value));
    }
    field.value = value;
  }

  function place(slider, value) {
    if (!value) return;
    const number = size(value), steps = slider.dataset.steps.split(",").map(Number);
    const after = steps.findIndex(step => step >= number);
    slider.value = after < 0 ? steps.length - 1 : after;
    slider.setAttribute("aria-valuetext", value);
  }

  function size(text) {
    const match = /^([\d.,]+)\s*([kKmM]?)/.exec(text);
    return match ? Number(match[1].replaceAll(",", "")) * {"": 1, k: 1024, m: 1048576}[match[2].toLowerCase()] : 0;
  }

  // What is left open shows what is assumed for it.
  function hint(assumed) {
    for (const field of all("[data-option]").filter(there)) {
      const value = assumed[field.dataset.option];
      if (field.id === "o-algorithm") continue;
      if (field.tagName === "SELECT" && field.options[0].value === "") {
        field.options[0].text = value ? `auto (${value})` : "auto";
      } else if (field.type === "text" && field.dataset.option !== "model") {
        field.placeholder = (value ?? "").split(" (")[0]; // what explains a number has no room in its field
      }
    }
    for (const slider of all("[data-slides]")) {
      if (!job.has(slider.dataset.slides)) place(slider, assumed[slider.dataset.slides]);
    }
  }

  // A micro-batch is said in samples or in tokens.
  const OTHER = {"micro-batch": "micro-tokens", "micro-tokens": "micro-batch"};

  function put(name, value) {
    if (value && job.has(OTHER[name])) {
      job.delete(OTHER[name]);
      byId(`o-${OTHER[name]}`).value = "";
    }
    if (name === "set") {
      job.delete("set");
      for (const pair of value.split(/\s+/).filter(Boolean)) job.append("set", pair);
    } else if (value === "") job.delete(name);
    else job.set(name, value);
    if (name === "model" && value) job.delete("config");
  }

  function take(field) {
    if (field.dataset.slides) {
      const name = field.dataset.slides, value = field.dataset.steps.split(",")[Number(field.value)];
      put(name, value);
      byId(`o-${name}`).value = value;
      field.setAttribute("aria-valuetext", value);
    } else if (field.type === "checkbox") {
      const name = field.dataset.option;
      put(name, all(`[data-option="${name}"]:checked`).map(box => box.value).join(","));
    } else if (field.type !== "radio" || field.checked) put(field.dataset.option, field.value.trim());
  }

  // The address
  function address() {
    return `#${job}${pin ? `&pin=${encodeURIComponent(pin)}` : ""}`;
  }

  function write(lasting) {
    clearTimeout(written);
    if (lasting) {
      if (location.hash !== address()) history.pushState(null, "", address());
    } else written = setTimeout(() => history.replaceState(null, "", address()), 250);
  }

  function open() {
    clearTimeout(written);
    job = new URLSearchParams(location.hash.slice(1) || START);
    pin = job.get("pin") ?? "";
    job.delete("pin");
    changed();
  }

  function load(link) {
    job = new URLSearchParams(link);
    write(true);
    changed();
  }

  function changed() {
    fill();
    follow();
    rest();
  }

  // At rest
  function rest() {
    clearTimeout(resting);
    slow?.abort();
    byId("fitted").textContent = "";
    list();
    resting = setTimeout(settle, REST);
  }

  // A search decides most of a strategy itself, so that its plans stay while only that is changed.
  function stated() {
    const rest = new URLSearchParams(job);
    const {open, rolesOpen} = byId("controls").dataset;
    for (const name of (job.get("algorithm") ? rolesOpen : open).split(" ")) rest.delete(name);
    return rest.toString();
  }

  function list() {
    const answer = plans.get(stated());
    for (const id of ["plans", "count"]) byId(id).classList.toggle("stale", !answer);
    if (!answer) return;
    swap(byId("plans"), answer.plans);
    byId("count").textContent = answer.count;
    byId("listed").textContent = answer.title;
  }

  async function settle() {
    slow = new AbortController();
    const {signal} = slow, link = job.toString(), searched = stated();
    await Promise.allSettled([
      plans.has(searched) ? null : fetched("plan", searched, signal, answer => {
        plans.set(searched, answer);
        list();
      }),
      byId("every-term").open ? terms(signal) : null,
      remarks(link, signal),
      pin ? fetched("compare", new URLSearchParams({a: pin, b: link}), signal, answer => {
        swap(byId("difference"), answer.difference);
      }) : null,
    ]);
    if (!signal.aborted) document.body.dataset.rests = link;
  }

  async function fetched(request, text, signal, use) {
    try {
      use(await asked(request, text.toString(), signal));
    } catch (problem) {
      if (problem.name === "AbortError") return;
      const said = byId("message").textContent;
      if (said && problem.message.endsWith(said)) problem.message = "";
      if (request === "plan") {
        byId("plans").textContent = begun(problem.message);
        byId("plans").classList.remove("stale");
        byId("count").textContent = "";
      } else if (request === "compare") byId("difference").textContent = begun(problem.message);
    }
  }

  // What is said of a job, and does not move its bar, comes when the controls rest; then it stays with the answer.
  async function remarks(link, signal) {
    await standing;
    const answer = answers.get(link);
    if (!answer || answer.remarked || signal.aborted || job.has("algorithm")) return;
    await fetched("remarks", link, signal, remark => {
      Object.assign(answer, remark, {remarked: true});
      if (shown === answer) swap(byId("warnings"), answer.warnings);
    });
  }

  function terms(signal) {
    return fetched("terms", job, signal, answer => swap(byId("terms"), answer.terms));
  }

  // What a control can be set to next is asked for before it is, so that the bar moves at once: one at a time, and never
  // while the screen itself waits.
  async function ahead(field) {
    scout += 1;
    const mine = scout;
    for (const link of alternatives(field)) {
      if (answers.has(link)) continue;
      while (busy || scouting) await new Promise(done => setTimeout(done, 15));
      if (mine !== scout) return;
      scouting = true;
      await asked("estimate", link).then(answer => remember(link, answer), () => {});
      scouting = false;
      if (mine !== scout) return;
    }
  }

  // The jobs that one step of a control leads to, the nearest first.
  function alternatives(field) {
    const name = field.dataset.slides ?? field.dataset.option;
    let values = [], at = 0;
    if (field.dataset.slides) {
      values = field.dataset.steps.split(",");
      at = Number(field.value);
    } else if (field.tagName === "SELECT") {
      values = [...field.options].map(option => option.value);
      at = field.selectedIndex;
    } else if (field.type === "radio") values = all(`[data-option="${name}"]`).map(box => box.value);
    const near = values.map((_, index) => index).sort((a, b) => Math.abs(a - at) - Math.abs(b - at));
    return near.slice(0, AROUND).map(index => {
      const next = new URLSearchParams(job);
      next.delete(values[index] ? OTHER[name] : "");
      if (values[index]) next.set(name, values[index]);
      else next.delete(name);
      return next.toString();
    });
  }

  // Another algorithm has other options: the server says which of them stay, and what the others begin with.
  async function turn(algorithm) {
    const next = new URLSearchParams(job);
    next.set("algorithm", algorithm);
    try {
      load((await asked("turn", next.toString())).link);
    } catch (problem) {
      refuse(problem);
    }
  }

  // Files
  async function dropped(files) {
    const texts = {};
    for (const file of files) {
      if (file.size > 900000) return refuse({message: `${file.name} is larger than 900 kB.`, field: ""});
      texts[file.name] = await file.text();
    }
    const [name] = Object.keys(texts);
    if (Object.keys(texts).length === 1 && isModel(texts[name])) return paste(texts[name]);
    try {
      const answer = await asked("check", JSON.stringify({files: texts, job: job.toString()}));
      load(answer.link);
      swap(byId("notice"), answer.findings);
      return note(answer.summary);
    } catch (problem) {
      return refuse(problem);
    }
  }

  function isModel(text) {
    try {
      const config = JSON.parse(text);
      return "model_type" in config || "architectures" in config;
    } catch {
      return false;
    }
  }

  function paste(text) {
    try {
      job.set("config", JSON.stringify(JSON.parse(text)));
    } catch {
      return refuse({message: "The pasted text is not JSON.", field: "model"});
    }
    job.delete("model");
    write(true);
    return changed();
  }

  // Buttons
  function note(text) {
    byId("status").textContent = text;
    setTimeout(() => { byId("status").textContent = ""; }, 2500);
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = Object.assign(document.createElement("textarea"), {value: text});
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    note("Copied.");
  }

  async function fit() {
    try {
      const answer = await asked("fit", job.toString());
      if (answer.link) load(answer.link);
      byId("fitted").textContent = answer.changes.join(" · ")
        || "No edit of recompute, micro-batch, ZeRO or offload is enough; see what would fit below.";
    } catch (problem) {
      refuse(problem);
    }
  }

  async function save() {
    try {
      const blob = await (await ask("export", job.toString())).blob();
      const link = Object.assign(document.createElement("a"), {href: URL.createObjectURL(blob), download: "memcalc-job.zip"});
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    } catch (problem) {
      byId("message").textContent = problem.message;
    }
  }

  function theme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
  }

  // Listening
  const controls = byId("controls");
  controls.addEventListener("submit", event => event.preventDefault());
  controls.addEventListener("input", event => {
    const field = event.target;
    if (!field.dataset.option && !field.dataset.slides) return;
    if (field.id === "o-algorithm") return void turn(field.value);
    since = event.timeStamp;
    take(field);
    write(false);
    if (!field.dataset.slides) for (const slider of all("[data-slides]")) place(slider, job.get(slider.dataset.slides));
    byId("report").href = `/api/report?${job}`;
    follow();
    rest();
    if (field.dataset.slides) ahead(field);
  });
  controls.addEventListener("change", event => {
    if (event.target.id === "o-algorithm") return;
    if (event.target.dataset.option || event.target.dataset.slides) write(true);
  });
  for (const field of all("[data-slides], select[data-option]:not(#o-algorithm), [data-option][type=radio]")) {
    for (const kind of ["pointerenter", "focus"]) field.addEventListener(kind, () => ahead(field));
  }
  byId("paste").addEventListener("change", event => event.target.value.trim() && paste(event.target.value));
  byId("files").addEventListener("change", event => dropped(event.target.files));
  document.addEventListener("dragover", event => {
    event.preventDefault();
    document.body.classList.add("drop");
  });
  document.addEventListener("dragleave", () => document.body.classList.remove("drop"));
  document.addEventListener("drop", event => {
    event.preventDefault();
    document.body.classList.remove("drop");
    if (event.dataTransfer.files.length) dropped(event.dataTransfer.files);
  });
  document.addEventListener("click", event => {
    const button = event.target.closest("button.load") ?? event.target.closest("#plan-table tbody tr")?.querySelector("button.load");
    if (button) load(button.dataset.link);
    const name = event.target.closest(".term-name");
    for (const term of all(".term.open")) if (term !== name?.parentElement) term.classList.remove("open");
    name?.parentElement.classList.toggle("open");
  });
  document.addEventListener("keydown", event => {
    if (event.key !== "/" || event.target.matches("input, textarea, select")) return;
    event.preventDefault();
    byId("o-model").focus();
  });
  byId("every-term").addEventListener("toggle", event => event.target.open && terms());
  byId("skip").addEventListener("click", event => {
    event.preventDefault();
    byId("answer").focus();
  });
  byId("fit").addEventListener("click", fit);
  byId("export").addEventListener("click", save);
  byId("copy-link").addEventListener("click", () => copy(location.origin + location.pathname + address()));
  byId("copy-command").addEventListener("click", () => copy(byId("command").textContent));
  byId("compare").addEventListener("click", () => {
    pin = pin ? "" : job.toString();
    write(true);
    changed();
  });
  byId("theme").addEventListener("change", event => {
    localStorage.setItem("memcalc-theme", event.target.value);
    theme(event.target.value);
  });
  byId("theme").value = localStorage.getItem("memcalc-theme") ?? "auto";
  theme(byId("theme").value);
  addEventListener("popstate", open);
  open();
})();
