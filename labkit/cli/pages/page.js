"use strict";
const root = document.documentElement;
const remember = (theme) => { try { localStorage.setItem("theme", theme); } catch { /* a page from a file may have none */ } };
try { root.dataset.theme = localStorage.getItem("theme") || ""; } catch { /* likewise */ }
document.getElementById("theme").onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  remember(root.dataset.theme);
};

const code = document.getElementById("code");
if (code) {
  code.onclick = () => {
    const open = code.getAttribute("aria-pressed") !== "true";
    code.setAttribute("aria-pressed", open);
    code.textContent = open ? "Hide code" : "Show code";
    document.querySelectorAll("details.code").forEach((cell) => { cell.open = open; });
  };
  document.querySelector(".contents").open = matchMedia("(min-width: 70rem)").matches;
}

const search = document.getElementById("search");
if (search) {
  const items = [...document.querySelectorAll("[data-text]")];
  const choices = [...document.querySelectorAll("select")];
  const shown = document.getElementById("shown");
  const values = (item, name) => item.dataset[name].split("|").filter(Boolean);
  for (const choice of choices) {
    const found = new Set(items.flatMap((item) => values(item, choice.name)));
    choice.append(...[...found].sort().map((value) => new Option(value)));
    choice.hidden = found.size < 2;
  }
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let runs = 0;
    for (const item of items) {
      item.hidden = !words.every((word) => item.dataset.text.includes(word))
        || !choices.every((choice) => !choice.value || values(item, choice.name).includes(choice.value));
      runs += item.hidden ? 0 : Number(item.dataset.runs);
    }
    const all = `${shown.dataset.all} run${shown.dataset.all === "1" ? "" : "s"}`;
    shown.textContent = runs === Number(shown.dataset.all) ? all : `${runs} of ${all}`;
  };
  search.form.oninput = filter;
  search.form.onsubmit = () => false;
  filter();
}
