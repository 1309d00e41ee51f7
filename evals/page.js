"use strict";
// Shows, for one token of the text, what the model expected there. For the data, see page_data().
const data = JSON.parse(document.getElementById("data").textContent);
const text = document.getElementById("text");
const panel = document.getElementById("panel");
const lines = document.getElementById("lines");
const hint = panel.textContent;
const tokens = [...text.querySelectorAll(".t")].map((span, number) => {
  const [s, t] = span.id.split("-").map(Number);
  return {sequence: data.sequences[s - 1], t, span, number};
});
let active;  // the token that the panel describes
let pinned = false;  // a click or a key chose it, so that pointing at another changes nothing

function make(tag, className, content, parent) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = content;
  parent.append(element);
  return element;
}

function percent(p) {
  return p > 0 && p < 1e-5 ? "<\u00a00.001\u00a0%"
    : `${Number((100 * p).toPrecision(p > 0.1 ? 3 : 2))}\u00a0%`;
}

function row(label, p, className = "") {
  const line = make("div", `row ${className}`, "", panel);
  make("code", "", label, line);
  make("i", "", "", make("span", "bar", "", line)).style.width = `${100 * p}%`;
  make("span", "value", percent(p), line);
}

function describe({sequence, t, span}) {
  const at = t - 1;  // the position that predicts the token
  const nameOf = (index) => data.names[sequence.ids[index]];
  const head = make("header", "", "", panel);
  make("span", "glyph", nameOf(t), head);
  make("span", "soft", `sequence ${span.id.replace("-", ", token ")}`, head);
  const close = make("button", "", "\u00d7", head);
  close.ariaLabel = "Close";
  close.onclick = () => show();
  if (t === 0) return make("p", "", "The sequence begins here: nothing predicts its first token.", panel);
  const loss = sequence.loss[at];
  const p = Math.exp(-loss);
  const summary = `loss ${loss.toFixed(3)} nats, ${(loss / Math.LN2).toFixed(3)} bits; probability ${percent(p)}`;
  make("p", "loss", summary, panel);
  document.getElementById("heard").textContent = `${nameOf(t)}: ${summary}`;

  make("h3", "", "What the model expected", panel);
  const likely = sequence.likely[at];
  const rowOf = (id, i) => id === sequence.ids[t] ? row(nameOf(t), p, "true") : row(data.names[id], sequence.p[at][i]);
  likely.forEach(rowOf);
  if (!likely.includes(sequence.ids[t])) row(nameOf(t), p, "true");

  make("h3", "", "Its probability without parts of the model", panel);
  row("all parts", p, "true");
  row("no n-grams", Math.exp(-sequence.bare[at]));
  if (data.copy) {
    row("no copying", Math.exp(-sequence.alone[at]), "copy");
    make("h3", "copy", "Copied from", panel);
    const length = sequence.length[at];
    const from = sequence.from[at];
    const next = sequence.ids[from] === sequence.ids[t] ? ", too." : "; here it does not.";
    const before = length ? ` Equal tokens before: ${length}${length === data.copy ? " or more" : ""}.` : "";
    make("p", "copied", from < 0 ? "Nowhere: its document has no earlier token." : `${nameOf(from)} stood ${t - from}`
      + ` tokens earlier${next}${before} ${percent(sequence.share[at])} of the pointer's attention is there.`, panel);
  }

  make("h3", "reads", `What the last attention reads (layer ${data.layer})`, panel);
  const chips = make("div", "chips", "", panel);
  sequence.reads[at].forEach((index, i) => {
    const chip = make("span", "", `${t - index} back, ${percent(sequence.shares[at][i] / 1e3)}`, chips);
    chip.prepend(make("code", "", nameOf(index), chip));
  });
}

function mark({sequence, t, span, number}) {
  const spanOf = (index) => tokens[number - t + index].span;
  span.classList.add("active");
  span.ariaSelected = "true";
  text.setAttribute("aria-activedescendant", span.id);
  sequence.reads[t - 1]?.forEach((index, i) => {
    spanOf(index).classList.add("read");
    spanOf(index).style.setProperty("--share", 1.5 + Math.min(4, sequence.shares[t - 1][i] / 100));
  });
  const from = sequence.from?.[t - 1] ?? -1;
  if (from < 0) return;
  for (let i = 1; i <= sequence.length[t - 1]; i++) {
    for (const index of [t - i, from - i]) spanOf(index).classList.add("match");
  }
  spanOf(from).classList.add("from");
}

function draw() {  // the line from the place that was copied
  const source = text.querySelector(".from");
  lines.replaceChildren();
  if (!source) return;
  const origin = text.getBoundingClientRect();
  const [a, b] = [source, active.span].map((span) => {
    const box = span.getClientRects()[0];
    return {x: box.left + box.width / 2 - origin.left, y: box.top - origin.top};
  });
  const lift = Math.min(60, 18 + Math.abs(b.x - a.x) / 8);
  lines.innerHTML = `<path d="M${a.x} ${a.y}C${a.x} ${a.y - lift} ${b.x} ${b.y - lift} ${b.x} ${b.y - 2}"/>`
    + `<path d="M${b.x - 4} ${b.y - 8}l4 6l4 -6"/><circle cx="${a.x}" cy="${a.y}" r="3.5"/>`;
}

function show(token, pin) {
  for (const {span} of tokens) span.classList.remove("active", "read", "match", "from");
  if (active) active.span.ariaSelected = null;
  panel.textContent = token ? "" : hint;
  active = token;
  pinned = Boolean(pin);
  panel.className = !token ? "idle" : pinned ? "pinned" : "";
  if (token) describe(token);
  if (token) mark(token);
  draw();
  if (pin) active.span.scrollIntoView({block: "nearest"});
}

function inNextLine(step) {  // the token above or below the active one
  const box = ({span}) => span.getClientRects()[0];
  const isBeside = (a, b) => Math.abs(box(a).top - box(b).top) < 4;
  let first = active;
  while (first && isBeside(first, active)) first = tokens[first.number + step];
  if (!first) return first;
  const line = tokens.filter((token) => isBeside(token, first));
  const distance = (token) => Math.abs(box(token).left - box(active).left);
  return line.reduce((best, token) => (distance(token) < distance(best) ? token : best));
}

const find = (target) => tokens.find(({span}) => span === target.closest?.(".t"));
text.addEventListener("pointerover", (event) => {
  if (event.pointerType === "mouse" && !pinned && find(event.target)) show(find(event.target));
});
text.addEventListener("click", ({target}) => find(target) && show(find(target), true));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") show();
  const moves = {ArrowLeft: () => tokens[active.number - 1], ArrowRight: () => tokens[active.number + 1],
    ArrowUp: () => inNextLine(-1), ArrowDown: () => inNextLine(1)};
  if (document.activeElement !== text || !moves[event.key]) return;
  event.preventDefault();
  show((active ? moves[event.key]() : tokens[1]) ?? active, true);
});
addEventListener("resize", draw);
const named = tokens.find(({span}) => `#${span.id}` === location.hash);
if (named || innerWidth > 860) show(named ?? tokens[data.first], Boolean(named));
named?.span.scrollIntoView({block: "center"});
